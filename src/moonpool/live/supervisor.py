"""Starts the parts of a cluster on this machine by exec, restarts the dead, and ends all of them.

What a part is, it gets as a command line (`PartPlan`); this module knows only processes, pipes and signals. It keeps
three promises: Ctrl-C ends everything within 5 s; the supervisor's own death, even by SIGKILL, ends everything too
(each child reads a pipe whose only writer is here); the Conductor hears of a child's death at once (`events.Lost`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from moonpool.core.events import Lost
from moonpool.core.vocabulary import Incarnation, PartId, Peer
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.live.process import LIFE_FD, REPORT_FD, RESTART, USER_MISTAKE, Birth, Doing, Failure, Report
from moonpool.wire.link import Link

log = logging.getLogger(__name__)

TOKEN_ENV = "MOONPOOL_CLUSTER_TOKEN"
KILL_SECONDS = 4.0
"""From SIGTERM to SIGKILL; parts end themselves after 3 s."""
FIRST_LEAVE_SECONDS = 2.0
"""Of that, what workers have before their nodes are told to end too."""
STARTS = 3
"""Attempts of a part that has not come up yet, before the whole cluster ends."""
MISTAKES = 5
"""Restarts refused with exit status 2 in a row, before the whole cluster ends."""
LAST_WORDS_SECONDS = 1.0
"""For what a dead part's report pipe still holds."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
STEADY_SECONDS = 30.0
"""A part that lived this long starts over with the shortest pause."""


class PartPlan(msgspec.Struct, frozen=True):
    """One part: what to run, and what it stands on."""

    id: PartId
    arguments: tuple[str, ...]
    after: tuple[PartId, ...] = ()
    """Parts that must be up before this one starts."""
    ends_with: PartId | None = None
    """The part whose death ends this one too (a worker's node: its arena is gone)."""
    conducts: bool = False
    """This part embeds the Conductor: its address goes to the others, and a restart must keep its port."""


class Progress(msgspec.Struct, frozen=True):
    """What the user sees: a part is `starting` (`detail`: what it does), `up`, or `ended` and will be started again."""

    part: PartId
    state: str
    detail: str = ""


@dataclass
class Child:
    """A plan and the process that runs it now."""

    plan: PartPlan
    process: asyncio.subprocess.Process | None = None
    birth: Birth | None = None
    failure: Failure | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    was_up: bool = False
    failures: int = 0
    """Its own, in a row; a steady life ends the row."""
    base: Birth | None = None
    """The life of the part that this one ends with, when it began."""
    is_ended_by_us: bool = False

    def signal(self, sign: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(sign)

    def has_ended(self) -> bool:
        """Also where that has just happened and the event loop does not know yet."""
        if self.process is None or self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True


class Supervisor:
    """`run` until `stop`. `keep_fds` are inherited by all children; `command` is what a plan's arguments follow."""

    def __init__(
        self,
        plans: Sequence[PartPlan],
        token: str,
        keep_fds: Sequence[int],
        notify: Callable[[Progress], None],
        command: Sequence[str] = (sys.executable, "-P", "-m", "moonpool"),
    ) -> None:
        self._command = tuple(command)
        self._children = {plan.id: Child(plan) for plan in plans}
        self._token = token
        self._keep_fds = tuple(keep_fds)
        self._notify = notify
        self._stop = asyncio.Event()
        self._link: Link | None = None
        self._life_fd = -1
        self._conductor = ""

    def stop(self) -> None:
        """End all parts; a second call does not wait for them."""
        if self._stop.is_set():
            for child in self._children.values():
                child.signal(signal.SIGKILL)
        self._stop.set()

    async def run(self) -> None:
        """Returns when every process has ended. Raises what keeps the cluster from starting (as MoonpoolError)."""
        self._link = Link(PartId("supervisor"), "127.0.0.1", 0, self._token)
        self._life_fd, life_writer = os.pipe()
        keepers = [asyncio.create_task(self._keep(child)) for child in self._children.values()]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            await self._end(list(self._children.values()))
            for task in (stop, *keepers):
                task.cancel()
            ended = await asyncio.gather(*keepers, return_exceptions=True)
            await self._end(list(self._children.values()))
            self._link.close()
            os.close(self._life_fd)
            os.close(life_writer)
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome

    async def all_up(self) -> None:
        """Returns when every part can be reached."""
        for child in self._children.values():
            await child.up.wait()

    async def _keep(self, child: Child) -> None:
        """One part's lives, one after another."""
        pause = 0.0
        loop = asyncio.get_running_loop()
        while not self._stop.is_set():
            await asyncio.sleep(pause)
            for earlier in child.plan.after:
                await self._children[earlier].up.wait()
            if self._stop.is_set():
                return
            began = loop.time()
            status = await self._live(child)
            if self._stop.is_set():
                return
            lived = loop.time() - began
            if self._ended_with_its_base(child):
                self._tell_loss(child, f"it ends with {child.plan.ends_with}")
                pause = FIRST_PAUSE
                continue
            child.failures = 1 if child.was_up and lived > STEADY_SECONDS else child.failures + 1
            self._mourn(child, status)
            pause = min(FIRST_PAUSE * 2 ** (child.failures - 1), LONGEST_PAUSE)
            await self._end([other for other in self._children.values() if other.plan.ends_with == child.plan.id])

    async def _live(self, child: Child) -> int:
        """Start the process and follow it to its end; its exit status (negative: the signal)."""
        report_fd, report_writer = os.pipe()
        child.birth = child.failure = None
        child.is_ended_by_us = False
        child.base = self._children[child.plan.ends_with].birth if child.plan.ends_with else None
        self._notify(Progress(child.plan.id, "starting"))
        try:
            child.process = await asyncio.create_subprocess_exec(
                *self._command,
                *child.plan.arguments,
                *self._addresses(child.plan),
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ
                | {LIFE_FD: str(self._life_fd), REPORT_FD: str(report_writer), TOKEN_ENV: self._token}
                | {RESTART: "1" if child.was_up else ""},
                pass_fds=(self._life_fd, report_writer, *self._keep_fds),
                process_group=0,
            )
        except BaseException:
            os.close(report_fd)
            raise
        finally:
            os.close(report_writer)
        follower = asyncio.create_task(self._follow(child, report_fd))
        try:
            status = await child.process.wait()
            await asyncio.wait([follower], timeout=LAST_WORDS_SECONDS)
        finally:
            follower.cancel()
            child.up.clear()
        return status

    async def _follow(self, child: Child, report_fd: int) -> None:
        """Read what the child says of itself until it closes the pipe, that is, until it ends."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(report_fd, "rb", buffering=0)
        )
        try:
            async for line in reader:
                match msgspec.json.decode(line, type=Report):
                    case Doing(what=what):
                        self._notify(Progress(child.plan.id, "starting", what))
                    case Birth() as birth:
                        self._born(child, birth)
                    case Failure() as failure:
                        child.failure = failure
        finally:
            transport.close()

    def _born(self, child: Child, birth: Birth) -> None:
        child.birth = birth
        child.was_up = True
        if child.plan.conducts:
            self._conductor = birth.conductor
        child.up.set()
        self._notify(Progress(child.plan.id, "up", birth.address))

    def _addresses(self, plan: PartPlan) -> tuple[str, ...]:
        """The Conductor's address for those who join it; its old port for a Conductor that comes back."""
        if not plan.conducts:
            return ("--conductor", self._conductor)
        return ("--control-port", self._conductor.rsplit(":", 1)[1]) if self._conductor else ()

    def _ended_with_its_base(self, child: Child) -> bool:
        """Ended by us, or by itself because the part that it stands on is gone: no failure of its own."""
        if child.plan.ends_with is None:
            return False
        base = self._children[child.plan.ends_with]
        return child.is_ended_by_us or base.has_ended() or base.birth is not child.base

    def _mourn(self, child: Child, status: int) -> None:
        """Tell the Conductor and the user; raise where another start cannot help."""
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        reason = child.failure.message if child.failure else how
        if status == USER_MISTAKE and (not child.was_up or child.failures >= MISTAKES):
            raise ConfigError(reason)
        if not child.was_up and child.failures >= STARTS:
            raise MoonpoolError(f"{child.plan.id} did not come up in {STARTS} attempts: {reason}")
        self._tell_loss(child, reason)

    def _tell_loss(self, child: Child, reason: str) -> None:
        if self._link is not None and child.birth is not None and not child.plan.conducts:
            conductor = Peer(PartId("conductor"), Incarnation(""), self._conductor)
            self._link.post(conductor, Lost(child.plan.id, child.birth.incarnation, reason))
        self._notify(Progress(child.plan.id, "ended", reason))

    async def _end(self, children: Sequence[Child]) -> None:
        """SIGTERM, then SIGKILL after KILL_SECONDS; returns when these processes are gone.

        Those that stand on others end first, so that none of them finds what it stands on gone.
        """
        running = [child for child in children if child.process is not None and child.process.returncode is None]
        leaving = [child for child in running if child.plan.ends_with is not None]
        kill_at = asyncio.get_running_loop().time() + KILL_SECONDS
        await self._terminate(leaving, FIRST_LEAVE_SECONDS)
        late = await self._terminate(running, kill_at - asyncio.get_running_loop().time())
        if late:
            for child in running:
                child.signal(signal.SIGKILL)
            await asyncio.wait(late, timeout=KILL_SECONDS)

    async def _terminate(self, children: Sequence[Child], seconds: float) -> set[asyncio.Task[int]]:
        """SIGTERM, and up to so many seconds to end; those that have not."""
        for child in children:
            child.is_ended_by_us = True
            child.signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in children if child.process is not None]
        return (await asyncio.wait(waits, timeout=max(seconds, 0.0)))[1] if waits else set()
