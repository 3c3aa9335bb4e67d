"""vLLM's side of the pool: a connector that vLLM loads by `kv_connector_module_path` (docs/vllm.md).

    --kv-transfer-config '{
        "kv_connector": "MoonpoolConnector", "kv_connector_module_path": "moonpool.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": "/run/user/1000/pool/node-0.sock"}}'

vLLM makes one of these beside its scheduler and one in each worker. Mistakes in the configuration are raised when it
starts; afterwards nothing is: what goes wrong is a miss, counted, and said now and then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import vllm

from moonpool.connectors.settings import untested
from moonpool.errors import ConfigError

try:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
except ImportError as e:
    # Nobody has said yet that it may be tried; it could not be.
    raise ConfigError(f"{untested(vllm.__version__)}; this one lacks what the connector is made of: {e}") from e

from moonpool.connectors.counters import COUNTS, Counters, log
from moonpool.connectors.identity import Model, Shape, Spaces, digest_of, weights_of
from moonpool.connectors.link import NodeLink
from moonpool.connectors.lookup import Lookup
from moonpool.connectors.pages import Pages
from moonpool.connectors.plan import StepPlan
from moonpool.connectors.scheduling import SchedulerHalf
from moonpool.connectors.settings import (
    ConnectorSettings,
    check_policy,
    check_supported,
    check_version,
    layer_specs,
    read_settings,
)
from moonpool.connectors.working import WorkerHalf


@dataclass
class MoonpoolMetadata(KVConnectorMetadata):
    """From the scheduler's half to the workers', each step."""

    plan: StepPlan


@dataclass
class MoonpoolHandshake(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler's half, once."""

    shape: Shape


@dataclass
class MoonpoolStats(KVConnectorStats):
    """Sums of `counters.COUNTS`."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(amount, 3) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class MoonpoolMetrics(KVConnectorPromMetrics):
    """`vllm:moonpool_…_total` on vLLM's /metrics."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(name=f"vllm:moonpool_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(amount)


class MoonpoolConnector(KVConnectorBase_V1):
    """The methods are vLLM's; what they do is in `scheduling` and `working`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """`kv_cache_config`: earlier versions give none, of which `check_version` says more than a TypeError."""
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config)
        check_version(vllm.__version__, settings.allow_untested_vllm)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_policy(transfer.kv_load_failure_policy)
        check_supported(vllm_config, kv_cache_config)
        name = settings.name or f"vllm-{transfer.engine_id}"
        self._settings = msgspec.structs.replace(settings, name=name)
        self._counters = Counters()
        self._link = NodeLink(settings.node, f"{name} {role.name.lower()}", self._counters)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._lookup: Lookup | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._spaces = Spaces(_model(vllm_config, kv_cache_config, settings))
            self._lookup = Lookup(self._link, self._counters, settings.lookup_seconds)
            self._scheduler = SchedulerHalf(
                self._spaces, self._lookup, self._counters, transfer.is_kv_consumer, transfer.is_kv_producer
            )
        else:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            rank = get_tensor_model_parallel_rank() if ranks > 1 else 0
            self._worker = WorkerHalf(self._settings, self._link, self._counters, rank, ranks)

    @property
    def requires_kv_delivery(self) -> bool:
        """It is a cache: what is not stored is a miss."""
        return False

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        pages = Pages(kv_caches, self._kv_cache_config.num_blocks)
        self._worker.pages = pages
        log.info("%d layers, %d bytes a block and layer: %s", len(pages), pages.run_bytes, pages.layout)

    def get_handshake_metadata(self) -> MoonpoolHandshake | None:
        assert self._worker is not None
        pages = self._worker.pages
        if pages is None:
            return None
        layers = self._vllm_config.compilation_config.static_forward_context
        backends = sorted({layers[name].get_attn_backend().get_name() for name in pages.names})
        device = f"{vllm.platforms.current_platform.device_type}, {'+'.join(backends)}"
        return MoonpoolHandshake(Shape(len(pages), pages.run_bytes, f"{pages.layout}, {device}"))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        with self._safely():
            assert self._worker is not None
            self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        with self._safely():
            assert self._worker is not None
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is computed on blocks before all of them are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        with self._safely():
            assert self._worker is not None
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        with self._safely():
            assert self._worker is not None
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.take_arrived()

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_invalid()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are stored as they are computed."""
        return True

    # The scheduler's half

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, MoonpoolHandshake]) -> None:
        self._spaces.learn({(0, rank): worker.shape for rank, worker in metadata.items()})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with self._safely():
            assert self._scheduler is not None
            return self._scheduler.matched(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        numbers = blocks.get_block_ids()[0]
        with self._safely():
            self._scheduler.allocated(request, numbers, num_external_tokens)
            return
        if num_external_tokens:
            self._scheduler.give_up(request, numbers)

    def build_connector_meta(self, scheduler_output: Any) -> MoonpoolMetadata:
        assert self._scheduler is not None
        return MoonpoolMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        with self._safely():
            assert self._scheduler is not None
            self._scheduler.heard(connector_output.finished_recving or (), connector_output.invalid_block_ids or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        with self._safely():
            assert self._scheduler is not None
            return False, self._scheduler.finished(request)
        return False, None

    # Both

    def get_kv_connector_stats(self) -> MoonpoolStats | None:
        counts = self._counters.take()
        return MoonpoolStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MoonpoolStats:
        return MoonpoolStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MoonpoolMetrics:
        return MoonpoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        with self._safely():
            if self._lookup is not None:
                self._lookup.close()
            if self._worker is not None:
                self._worker.close()
            self._link.close()

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        """A fault of ours is a miss to vLLM."""
        try:
            yield
        except Exception:
            self._counters.add("faults")
            self._counters.say("fault", "the connector failed; vLLM goes on without", is_fault=True)


def _model(config: VllmConfig, caches: Any, settings: ConnectorSettings) -> Model:
    """Raises ConfigError."""
    model, spec = config.model_config, caches.kv_cache_groups[0].kv_cache_spec
    spec = layer_specs(spec)[0]

    def in_cache(name: str) -> str:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(name, revision=model.revision, local_files_only=True))

    return Model(
        weights=weights_of(model.model, settings.model, in_cache),
        settings=digest_of(
            model.hf_config.to_dict() | {"_name_or_path": "", "transformers_version": ""},
            model.quantization,
            str(model.dtype),
            vllm.__version__.split("+")[0],
        ),
        dtype=f"{config.cache_config.cache_dtype}, {spec.dtype}",
        block_tokens=spec.block_size,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
    )


__all__ = ["MoonpoolConnector"]
