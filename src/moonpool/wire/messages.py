"""Messages between processes that are not facts or orders of the decision core (docs/protocol.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from moonpool.core.actions import Action, Place
from moonpool.core.events import Event
from moonpool.core.prefill import Chunk
from moonpool.core.vocabulary import (
    BLOCK_KEY_BYTES,
    BlockKey,
    Count,
    Incarnation,
    KeySpaceId,
    NodePeer,
    PartId,
    Peer,
    RequestId,
    Seconds,
    TimeLeft,
)

MAX_TRANSFER_BYTES = 1 << 20


class Sampling(Struct, frozen=True):
    """How the next tokens of one request are drawn. A draw is Philox(seed, choice, output position)."""

    seed: int
    choice: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none; k: the drawn token's and the k best tokens' log probabilities."""


class Work(Struct, frozen=True):
    """One attempt of a request, as the worker needs it. `tokens[prompt_tokens:]` are output so far."""

    request: RequestId
    attempt: Count
    label: str
    """The client's x-request-id, for logs."""
    gateway: Peer
    tokens: tuple[int, ...]
    prompt_tokens: Count
    sampling: Sampling
    keys: tuple[BlockKey, ...]
    """Of the whole blocks of `tokens` at the time of placement."""
    salt: str
    place: Place
    time_left: TimeLeft


class PrefillOrder(Struct, frozen=True, tag=True):
    """Gateway to prefill worker: compute KV for all of `work.tokens` and draw the next token."""

    work: Work


class HandOver(Struct, frozen=True, tag=True):
    """Prefill worker to decode worker: `work.tokens` now ends with the token just drawn (it has no KV yet).

    Between external instances it ends before that: decode draws it again.
    """

    work: Work
    prefill: Peer
    cached_tokens: Count
    transfer: Annotated[bytes, Meta(max_length=MAX_TRANSFER_BYTES)] = b""
    """Between external instances that hand over by themselves: what prefill's server gave for decode's, JSON."""


class Abandon(Struct, frozen=True, tag=True):
    """Prefill worker to decode worker: this attempt's KV will not come."""

    request: RequestId
    attempt: Count


class Stop(Struct, frozen=True, tag=True):
    """Gateway to decode worker: a stop string was found; finish as if the model had stopped (keep the blocks)."""

    request: RequestId
    attempt: Count


class TokenOut(Struct, frozen=True, array_like=True):
    """One drawn token. `position` counts output tokens of the request from 0, over all attempts."""

    request: RequestId
    attempt: Count
    position: Count
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), best first."""
    finish: str | None = None
    """`stop` (end token; the token itself is not text) or `length`."""
    cached_tokens: Count | None = None
    """With the first token of an attempt: prompt tokens whose KV was not computed.

    External instances say it again with the final token, when their server has told them.
    """


class Tokens(Struct, frozen=True, tag=True):
    """Worker to gateway: all tokens of one step for that gateway."""

    tokens: tuple[TokenOut, ...]


class Counters(Struct, frozen=True, tag=True):
    """Part to Conductor, once a second: monotonic counters and gauges since this incarnation began."""

    id: PartId
    incarnation: str
    values: dict[str, float]


class Describe(Struct, frozen=True, tag=True):
    """Anyone in the cluster to the Conductor's process: what is the state?"""

    to: Peer
    serial: Count
    request: str = ""
    """Not of the cluster but of this request, or of those of this x-request-id."""
    blocks_after: str | None = None
    """Not of the cluster but a page of the blocks in the pool, from here on; empty: the first."""
    live: bool = False
    """Beside the state what the dashboard shows: what was weighed for the newest requests, the hottest prefixes."""


class Description(Struct, frozen=True, tag=True):
    """`state` is a JSON document (bytes): the body of GET /cluster, a list of `wire.story.Story`, or the body of
    GET /cluster/blocks (null for a page that there is not)."""

    serial: Count
    state: bytes


class Locate(Struct, frozen=True, tag=True):
    """Node to Conductor: who has these blocks, in any tier? `keys`: one behind the other."""

    to: Peer
    serial: Count
    space: KeySpaceId
    keys: bytes

    def unpacked(self) -> list[BlockKey]:
        size = BLOCK_KEY_BYTES
        return [BlockKey(self.keys[at : at + size]) for at in range(0, len(self.keys) // size * size, size)]


class Located(Struct, frozen=True, tag=True):
    """The answer to `Locate`: one bitmask a key, of the places in `nodes`, each `width` bytes (little-endian)."""

    serial: Count
    nodes: tuple[NodePeer, ...]
    width: Annotated[int, Meta(ge=1, le=1 << 16)]
    masks: bytes

    @classmethod
    def of(cls, serial: int, holders: Sequence[Sequence[NodePeer]]) -> Located:
        """`holders`: of each key."""
        bits: dict[NodePeer, int] = {}
        for nodes in holders:
            for node in nodes:
                bits.setdefault(node, 1 << len(bits))
        width = max(1, (len(bits) + 7) // 8)
        masks = b"".join(sum(bits[node] for node in nodes).to_bytes(width, "little") for nodes in holders)
        return cls(serial, tuple(bits), width, masks)

    def holders(self) -> list[tuple[NodePeer, ...]]:
        found = []
        for at in range(0, len(self.masks), self.width):
            mask = int.from_bytes(self.masks[at : at + self.width], "little")
            found.append(tuple(node for place, node in enumerate(self.nodes) if mask >> place & 1))
        return found


class IntakeAddress(Struct, frozen=True):
    """How others reach what a stage takes hidden states in (`messenger/intake.py`)."""

    host: PartId
    """The node on the taker's host."""
    memory: str
    """A file, for those on that host."""
    data_address: str
    """`host:port`, for all others."""
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 32)]


class StageReady(Struct, frozen=True, tag=True):
    """A stage to the leader of its group, until it is answered: it is there, and free."""

    stage: Count
    intake: IntakeAddress


class JoinGroup(Struct, frozen=True, tag=True):
    """Leader to a stage: all are there. What the group says of `group` other than this one is of its last life."""

    group: Incarnation
    """The leader's incarnation."""
    stages: Count
    home: NodePeer
    """The leader's node: its pool has what the group computes, unless it is decoded elsewhere."""
    next: Peer | None
    """None for the last one."""
    intake: IntakeAddress | None
    """Of the next one."""


class GroupJoined(Struct, frozen=True, tag=True):
    group: Incarnation
    problem: str = ""


class GroupBroken(Struct, frozen=True, tag=True):
    """Stage to leader: it cannot go on."""

    group: Incarnation
    reason: str


Mark = Annotated[int, Meta(ge=0)]


class StageWork(Struct, frozen=True, tag=True):
    """Leader to a stage: have your layers of the first blocks in these pages, then say `StageLoaded`."""

    group: Incarnation
    work: Work
    pages: tuple[Count, ...]
    marks: tuple[Mark, ...]
    """Of each cached block, the first ones of the prompt, which copy of it all stages load (`digest.copy_mark`)."""
    caching: tuple[Count, ...]
    """Indices of the blocks that the leader's node has room for in its pool, where the prompt is decoded elsewhere."""


class StageLoaded(Struct, frozen=True, tag=True):
    group: Incarnation
    request: RequestId
    attempt: Count
    problem: str = ""


class EndStageWork(Struct, frozen=True, tag=True):
    """Leader to a stage: nothing more of this attempt will be computed. Finish its I/O, then say `StageWorkEnded`."""

    group: Incarnation
    request: RequestId
    attempt: Count


class StageWorkEnded(Struct, frozen=True, tag=True):
    group: Incarnation
    request: RequestId
    attempt: Count
    bytes_stored: Count
    problem: str = ""


class PassOn(Struct, frozen=True, tag=True):
    """A stage to the next one: it has done its part of this step. Steps come in the order of their serials."""

    group: Incarnation
    serial: Count
    chunks: tuple[Chunk, ...]
    nbytes: Count
    """Of hidden states in the slot of this serial; 0: nobody wants the step any more, or it has failed."""
    seconds: Seconds
    """Of the slowest stage so far."""
    failure: str = ""


class Taken(Struct, frozen=True, tag=True):
    """The answer to `PassOn`: its slot is free."""

    group: Incarnation
    serial: Count


class Drawn(Struct, frozen=True, array_like=True):
    """As `engine.Draw`."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    is_end: bool
    error: str | None


class StepEnded(Struct, frozen=True, tag=True):
    """The last stage to the leader."""

    group: Incarnation
    serial: Count
    draws: tuple[Drawn | None, ...]
    """One a chunk."""
    seconds: Seconds
    """Of the slowest stage."""
    failure: str = ""


Message = (
    Event
    | Action
    | PrefillOrder
    | HandOver
    | Abandon
    | Stop
    | Tokens
    | Counters
    | Describe
    | Description
    | Locate
    | Located
    | StageReady
    | JoinGroup
    | GroupJoined
    | GroupBroken
    | StageWork
    | StageLoaded
    | EndStageWork
    | StageWorkEnded
    | PassOn
    | Taken
    | StepEnded
)


class Envelope(Struct, frozen=True):
    """What travels: who sends, for which incarnation (empty: whoever listens there), and the message."""

    sender: Peer
    to: str
    body: Message
