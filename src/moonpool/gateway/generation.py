"""One choice of one request, as the gateway follows it through the cluster."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from moonpool.core.actions import Place
from moonpool.core.blocks import block_keys
from moonpool.core.events import RequestArrived
from moonpool.core.vocabulary import Chain, KeySpace, NodePeer, Peer, RejectReason, RequestId, Slo
from moonpool.wire.messages import Sampling, TokenOut, Work


class Job(Struct, frozen=True):
    """What the cluster is asked for. `sampling` is complete; `deadline` on the event loop's clock."""

    label: str
    """The client's x-request-id."""
    prompt: tuple[int, ...]
    chains: tuple[Chain, ...]
    """Of the prompt, one a key space of the fleet."""
    sampling: Sampling
    salt: str
    slo: Slo
    priority: str
    arrived: float
    deadline: float


class Completed(Struct, frozen=True):
    reason: str
    """`stop` or `length`."""


class Refused(Struct, frozen=True):
    reason: RejectReason
    message: str
    retry_after: float | None


class Cancelled(Struct, frozen=True):
    reason: str


Ending = Completed | Refused | Cancelled


@dataclass(slots=True, eq=False)
class Generation:
    """Its tokens so far, its current attempt, and in the end its one ending.

    `changed` is called when there are new tokens or the ending. Only `Cluster` writes to it.
    """

    request: RequestId
    job: Job
    changed: Callable[[], None]
    attempt: int = 1
    chains: tuple[Chain, ...] = ()
    """Of `tokens()` when the attempt began."""
    place: Place | None = None
    known_to: str = ""
    """Incarnation of the Conductor that knows of `place`."""
    begin: int = 0
    """How many output tokens there were when the attempt began."""
    output: list[int] = field(default_factory=list)
    fresh: list[TokenOut] = field(default_factory=list)
    """Not yet taken by the reader."""
    ahead: dict[int, TokenOut] = field(default_factory=dict)
    """By position, of the current attempt: the decode worker's connection may be quicker than the prefill worker's."""
    cached_tokens: int = 0
    """Of the prompt, in the attempt that gave the first token."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """Seconds between its tokens."""
    priority: str = ""
    """The class it was placed in."""
    ending: Ending | None = None
    timer: asyncio.TimerHandle | None = None

    def take(self, most: int) -> list[TokenOut]:
        """The next tokens that the reader has not got yet, in order."""
        taken, self.fresh = self.fresh[:most], self.fresh[most:]
        return taken

    def tokens(self) -> tuple[int, ...]:
        return (*self.job.prompt, *self.output)

    def begin_attempt(self, spaces: Sequence[KeySpace]) -> None:
        """The next one; whatever the last one still sends is not for it."""
        self.attempt += 1
        self.place = None
        self.ahead.clear()
        self.begin = len(self.output)
        self.chains = chains_of(self.tokens(), spaces, self.job.salt)

    def drawn(self) -> int:
        """Tokens of the current attempt, those included that are missing before the newest."""
        return max(self.ahead, default=len(self.output) - 1) + 1 - self.begin

    def needed(self) -> tuple[Peer, ...]:
        """The processes without which the attempt cannot go on; prefill until the second token, which is decode's."""
        place = self.place
        if place is None:
            return ()
        decode = place.decode, _control(place.decode_node)
        return decode if self.drawn() > 1 else (*decode, place.prefill, _control(place.prefill_node))

    def arrival(self, model: str, gateway: Peer, time_left: float) -> RequestArrived:
        """What the Conductor learns of the current attempt."""
        job = self.job
        return RequestArrived(
            request=self.request,
            attempt=self.attempt,
            gateway=gateway,
            model=model,
            prompt_tokens=len(job.prompt) + len(self.output),
            output_tokens=len(self.output),
            max_output_tokens=job.sampling.max_tokens - len(self.output),
            chains=self.chains,
            time_left=time_left,
            slo=job.slo,
            priority=job.priority,
            label=job.label,
            waited=max(job.deadline - job.arrived - time_left, 0.0),
        )

    def work(self, place: Place, gateway: Peer, time_left: float) -> Work:
        """What the workers of `place` need. `Sampling.max_tokens` counts the output of all attempts."""
        tokens = self.tokens()
        known = next((chain.keys for chain in self.chains if chain.space == place.space.id), None)
        return Work(
            request=self.request,
            attempt=place.attempt,
            label=self.job.label,
            gateway=gateway,
            tokens=tokens,
            prompt_tokens=len(self.job.prompt),
            sampling=self.job.sampling,
            keys=block_keys(tokens, place.space, self.job.salt) if known is None else known,
            salt=self.job.salt,
            place=place,
            time_left=time_left,
        )


def _control(node: NodePeer) -> Peer:
    return Peer(node.id, node.incarnation, node.address)


def chains_of(tokens: Sequence[int], spaces: Sequence[KeySpace], salt: str) -> tuple[Chain, ...]:
    """The keys of the whole blocks of `tokens` in each key space."""
    return tuple(Chain(space.id, block_keys(tokens, space, salt)) for space in spaces)
