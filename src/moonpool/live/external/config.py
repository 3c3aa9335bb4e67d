"""What is known of the external instances before any of them has been asked."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from moonpool.core.vocabulary import PartId, PartKind

Role = Literal["both", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
PoolUse = Literal["no", "exact", "estimated"]
_KINDS: dict[Role, PartKind] = {
    "both": PartKind.COUPLED,
    "prefill": PartKind.PREFILL,
    "decode": PartKind.DECODE,
}


class Instance(Struct, frozen=True):
    """One server."""

    id: PartId
    url: str
    """Of the server, without `/v1`."""
    role: Role = "both"
    max_sequences: int = 256
    """As its `--max-num-seqs`, which it does not tell."""
    api_key: str | None = None
    priorities: bool = False
    """It runs with `--scheduling-policy priority`; else it refuses any priority."""
    kv_events: str | None = None
    """ZMQ address of its KV events, `tcp://host:port`."""
    listens_for_kv_events: bool = False
    """That address is here, and the server connects to it."""
    kv_events_replay: str | None = None
    pool: PoolUse = "no"
    """It has Moonpool's connector: what it computes comes into the pool, and what is there it loads. `estimated`: the
    pool's nodes are in another cluster, or not to be asked: what was sent to such servers is taken to be there."""
    kv_transfer_params: bool = False
    """It has a connector by which servers hand over to each other: prefill's gives `kv_transfer_params`, decode's takes
    them. Else what prefill has computed comes to decode by way of the pool."""
    stall_seconds: float = 120.0
    """A request for which nothing comes for so long is given up."""

    @property
    def kind(self) -> PartKind:
        return _KINDS[self.role]


class ExternalConfig(Struct, frozen=True):
    model: str
    """As the servers and the clients call it."""
    instances: tuple[Instance, ...]
    kv_bytes_per_token: int = 131072
    """For what a load from the pool takes."""
    pool_tokens: int = 1 << 20
    """That the pool's nodes hold, all together."""
