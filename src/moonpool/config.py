"""The configuration: one frozen tree, read once by the command from one YAML file and the flags that override it.

Every field is one key, spelt in kebab-case in YAML and as a flag (`dram-per-node: 2GiB`, `--dram-per-node 2GiB`); keys
are unique over all sections, so the file is flat. A constructor elsewhere gets the values it needs, never the tree.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from moonpool.core.admission import AdmissionPolicy, DearFirst
from moonpool.core.coupled import CoupledMode
from moonpool.core.eviction import EvictionPolicy
from moonpool.core.vocabulary import PlacementPolicy, PriorityClass

BYTES = {"unit": "bytes"}
SECONDS = {"unit": "seconds"}

Port = Annotated[int, Meta(ge=0, le=65535)]
Bytes = Annotated[int, Meta(ge=1 << 20, le=1 << 50, extra=BYTES)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", extra={"pattern": "letters, digits, . _ -"})]
Seconds = Annotated[float, Meta(gt=0, le=86400 * 30, extra=SECONDS)]


class ModelConfig(Struct, frozen=True):
    model: Annotated[str, Meta(min_length=1, description="`smollm2`, a local Hugging Face directory, or a hub id")] = (
        "smollm2"
    )
    served_model_name: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="the name clients use (default: the model's)")
    ] = None
    engine: Annotated[
        Literal["torch", "timed"], Meta(description="what computes: torch, or timed (sleeps by a cost model)")
    ] = "torch"
    hardware: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="a hardware profile, as of `moonpool simulate`: the timed engine takes its seconds, and sizes "
            "that are not given are its own"
        ),
    ] = None
    slow_down: Annotated[float, Meta(gt=0, le=1e6, description="so many times slower than that hardware")] = 1.0
    shrink_kv: Annotated[float, Meta(ge=1, le=1e6, description="so many times fewer bytes of KV than it has")] = 1.0
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="of weights and KV (torch engine)")] = "float32"
    quantize: Annotated[
        Literal["none", "int8"],
        Meta(description="weights in fewer bits (torch engine, on a CPU with AVX2): faster, a little less accurate"),
    ] = "none"
    threads: Annotated[int, Meta(ge=1, le=256, description="torch threads in each worker")] = 1


class FleetConfig(Struct, frozen=True):
    prefill: Annotated[int, Meta(ge=1, le=64, description="prefill workers")] = 1
    decode: Annotated[int, Meta(ge=1, le=64, description="decode workers")] = 1
    coupled: Annotated[
        int, Meta(ge=0, le=64, description="workers that prefill and decode, in place of the others (0: none)")
    ] = 0
    inline: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="coupled workers beside the others, which compute short prompts while they decode "
            "where the TBT limit allows",
        ),
    ] = 0
    nodes: Annotated[int, Meta(ge=1, le=32, description="nodes; the workers are spread over them")] = 1


class PoolConfig(Struct, frozen=True):
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens in a KVCache block")] = 64
    dram_per_node: Annotated[Bytes, Meta(description="size of each node's arena of KVCache blocks")] = 1 << 30
    eviction: Annotated[EvictionPolicy, Meta(description="which blocks go first when a node's DRAM is full")] = "lru"
    caching_share: Annotated[
        float,
        Meta(
            ge=0, le=0.9, description="share of each node's DRAM and SSD that cached contexts and other pins may take"
        ),
    ] = 0.25
    ssd_per_node: Annotated[
        int, Meta(ge=0, le=1 << 50, extra=BYTES, description="size of each node's SSD tier below DRAM (0: none)")
    ] = 0
    ssd_dir: Annotated[
        str | None,
        Meta(description="directories of the SSD tier, comma-separated (default: `ssd` in the cache directory)"),
    ] = None
    lease_limit: Annotated[
        Seconds, Meta(description="longest that a worker may hold blocks of its node before it is killed as stuck")
    ] = 120.0
    client_quota: Annotated[
        Bytes | None,
        Meta(description="most bytes that a client not started by `serve` holds of a node (default: half of it)"),
    ] = None
    prefill_pages: Annotated[int, Meta(ge=2, le=1 << 20, description="KV pages in each prefill worker")] = 136
    decode_pages: Annotated[int, Meta(ge=2, le=1 << 20, description="KV pages in each decode worker")] = 136


class BatchConfig(Struct, frozen=True):
    prefill_chunk: Annotated[int, Meta(ge=1, le=1 << 20, description="most prompt tokens in one prefill step")] = 512
    pipeline: Annotated[
        int,
        Meta(ge=1, le=64, description="so many of the prefill workers form one instance and divide the layers"),
    ] = 1
    pipeline_chunk: Annotated[
        int, Meta(ge=1, le=1 << 20, description="the same in a pipeline, which chooses down to an eighth of it")
    ] = 512
    max_batch: Annotated[int, Meta(ge=1, le=4096, description="most requests in one decode batch")] = 16
    coupled_mode: Annotated[
        CoupledMode,
        Meta(description="how coupled workers mix: chunks of `prefill-chunk` with decode, or prompts first"),
    ] = "chunked"


class FrontConfig(Struct, frozen=True):
    host: Annotated[str, Meta(min_length=1, description="HTTP address of the gateway")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port of the gateway")] = 8000
    allowed_hosts: Annotated[
        str, Meta(description="names that clients may put in `Host` besides the address, comma-separated; * allows any")
    ] = ""
    keys: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="file with API keys (`moonpool keys`), needed where the address is not loopback (default: none)"
        ),
    ] = None
    request_timeout: Annotated[Seconds, Meta(description="a request's deadline after its arrival")] = 600.0
    max_requests: Annotated[
        int,
        Meta(ge=1, le=1 << 16, description="most choices in flight at the gateway before the next request gets 429"),
    ] = 512
    caching_dir: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="directory in which the gateway keeps cached contexts over restarts, or `off` "
            "(default: one of this port in the cache directory)"
        ),
    ] = None
    caching_quota: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 40)] | None,
        Meta(
            description="most tokens that the cached contexts of one API key, or its group, may pin (default: no limit)"
        ),
    ] = None


class ExternalConfig(Struct, frozen=True):
    """Engines that others have started."""

    instances: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="YAML file with vLLM servers to serve from, in place of workers (docs/vllm.md)"),
    ] = None


class PlacementConfig(Struct, frozen=True):
    slo_ttft: Annotated[Seconds | None, Meta(description="limit on time to first token")] = None
    slo_tbt: Annotated[Seconds | None, Meta(description="limit on time between tokens")] = None
    classes: Annotated[
        tuple[PriorityClass, ...],
        Meta(description="priority classes: a list, or a YAML file with one (docs/operations.md)"),
    ] = ()
    placement: Annotated[
        PlacementPolicy,
        Meta(description="how prefill and decode instances are chosen"),
    ] = "kvcache-centric"
    fetch_threshold: Annotated[
        float,
        Meta(ge=1, le=1e6, description="algorithm-1 fetches a prefix that is this many times longer elsewhere"),
    ] = 1.0
    admission: Annotated[
        AdmissionPolicy, Meta(description="what a request is refused by when a limit cannot be kept")
    ] = "forecast"
    dear_first: Annotated[
        DearFirst,
        Meta(
            description="in overload `forecast` refuses first what takes most computing for its worth; "
            "auto: with kvcache-centric"
        ),
    ] = "auto"
    queue_bound: Annotated[
        int, Meta(ge=1, le=1 << 20, description="most requests in the cluster before the next gets 429")
    ] = 256


class EventsConfig(Struct, frozen=True):
    """For routers of others."""

    kv_events_port: Annotated[
        Port | None,
        Meta(description="port at which the pool's blocks are published as vLLM's KV events (0: any; default: none)"),
    ] = None
    kv_events_replay_port: Annotated[
        Port | None, Meta(description="port for replays of them (0: any; default: the next one)")
    ] = None
    kv_events_host: Annotated[
        str, Meta(min_length=1, description="address of both; whoever reaches it reads token ids")
    ] = "127.0.0.1"


class JournalConfig(Struct, frozen=True):
    journal: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="directory of the Conductor's journal, or `off` (default: `journal` in the cache directory)"),
    ] = None
    journal_bytes: Annotated[Bytes, Meta(description="most that the journal keeps; the oldest goes first")] = 256 << 20


class LogConfig(Struct, frozen=True):
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line that is logged")
    ] = "info"
    log_json: Annotated[bool, Meta(description="log JSON objects, one a line")] = False


class PartConfig(Struct, frozen=True):
    """How one part that is started by itself finds the others and is found by them."""

    id: Annotated[Name | None, Meta(description="this part's name, unique in the cluster")] = None
    conductor: Annotated[str | None, Meta(description="the Conductor's control address, host:port")] = None
    node: Annotated[str | None, Meta(description="the node whose arena this worker maps")] = None
    bind: Annotated[str, Meta(min_length=1, description="address that other parts reach this one at")] = "127.0.0.1"
    control_port: Annotated[Port, Meta(description="port for control messages (0: any)")] = 0
    data_port: Annotated[Port, Meta(description="port for KVCache transfers (0: any)")] = 0
    run_dir: Annotated[str | None, Meta(description="where a node's socket lies (default: a new private one)")] = None


class StageConfig(Struct, frozen=True):
    """A prefill worker's place in its pipeline."""

    stage: Annotated[
        int, Meta(ge=0, le=63, description="which stage of its pipeline this prefill worker is; 0 leads it")
    ] = 0
    leader: Annotated[
        Name | None, Meta(description="the prefill worker that leads the pipeline which this one is a stage of")
    ] = None


class Config(Struct, frozen=True):
    """The tree. Sections group keys for the code; users see them flat."""

    model: ModelConfig = ModelConfig()
    fleet: FleetConfig = FleetConfig()
    pool: PoolConfig = PoolConfig()
    batch: BatchConfig = BatchConfig()
    front: FrontConfig = FrontConfig()
    external: ExternalConfig = ExternalConfig()
    placement: PlacementConfig = PlacementConfig()
    events: EventsConfig = EventsConfig()
    journal: JournalConfig = JournalConfig()
    log: LogConfig = LogConfig()
    part: PartConfig = PartConfig()
    stage: StageConfig = StageConfig()

    @property
    def served_name(self) -> str:
        """What clients call the model: the configured name, else the last part of its path or hub id."""
        return self.model.served_model_name or self.model.model.rstrip("/").rsplit("/", 1)[-1]


def as_flat(config: Config) -> dict[str, object]:
    """All keys with their values, as a YAML file would hold them; what is None is left out."""
    return {
        field.replace("_", "-"): plain_classes(value) if field == "classes" else value
        for section in config.__struct_fields__
        for field, value in msgspec.structs.asdict(getattr(config, section)).items()
        if value is not None
    }


def plain_classes(classes: tuple[PriorityClass, ...]) -> list[dict[str, object]]:
    """As YAML holds them."""
    rows = [
        {"name": c.name, "rank": c.rank, "slo-ttft": c.slo.ttft, "slo-tbt": c.slo.tbt, "share": c.share}
        for c in classes
    ]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]
