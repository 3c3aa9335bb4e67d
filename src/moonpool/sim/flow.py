"""Requests on their way through a simulated cluster: each comes at its time, and is forgotten when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moonpool.core.vocabulary import RequestId
from moonpool.sim.clock import Clock
from moonpool.sim.request import BlockKeys, SimRequest
from moonpool.trace.request import TraceRequest

PROGRESS = 100
"""So many more are over when it is told again."""

Told = Callable[[SimRequest], None]


def nobody(request: SimRequest) -> None:
    """Listens."""


class Flow:
    """What holds a request beyond its end is forgotten with it: memory does not grow with the trace."""

    def __init__(
        self, clock: Clock, trace: Iterable[TraceRequest], block_tokens: int, priorities: Iterable[str], on_come: Told
    ) -> None:
        """`trace`: in order of arrival, times from 0; no more of it is read than has come. `priorities`: of each, and
        no fewer than requests. `on_come`: a request has come."""
        self.open: dict[RequestId, SimRequest] = {}
        """Those that have come and are not over."""
        self.come = 0
        self.is_open = True
        """Some are open, or still to come."""
        self._clock = clock
        self._trace = trace
        self._priorities = priorities
        self._block_tokens = block_tokens
        self._on_come = on_come
        self._is_fed = False

    @property
    def over(self) -> int:
        return self.come - len(self.open)

    def run(self, arrive: Told, on_progress: Callable[[int], None]) -> None:
        """Until every request is over. `on_progress`: how many are, now and then."""
        clock, known, told = self._clock, BlockKeys(), 0
        for number, (each, priority) in enumerate(zip(self._trace, self._priorities, strict=False), 1):
            request = SimRequest.of(number, each, self._block_tokens, known, priority)
            # What happens at the same time comes after.
            clock.pass_until(request.arrived)
            self.come = number
            self.open[request.id] = request
            self._on_come(request)
            arrive(request)
            if self.over - told >= PROGRESS:
                told = self.over
                on_progress(told)
        self._is_fed = True
        self.is_open = bool(self.open)
        while self.open and clock.step():
            if self.over - told >= PROGRESS:
                told = self.over
                on_progress(told)
        assert not self.open, f"{len(self.open)} requests are not over and nothing happens any more"

    def end(self, request: SimRequest) -> None:
        """It is complete or refused."""
        del self.open[request.id]
        self.is_open = not self._is_fed or bool(self.open)
