"""What every part's process does around its work: logs, readiness, and a certain end.

A part that a supervisor started inherits two pipes. It reads from `LIFE_FD`, which ends when the supervisor is gone,
however it went; and it writes `Doing`, `Birth` or `Failure`, a JSON line each, to `REPORT_FD`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from moonpool.core.vocabulary import Incarnation, PartId, Peer
from moonpool.errors import ConfigError, JournalError, ModelError, MoonpoolError, TraceError
from moonpool.wire.legible import MOST_CHARS, legible

log = logging.getLogger(__name__)

LIFE_FD = "MOONPOOL_LIFE_FD"
REPORT_FD = "MOONPOOL_REPORT_FD"
RESTART = "MOONPOOL_RESTART"
"""Not empty: this part has been up before, in this cluster."""
ORPHAN_SECONDS = 1.0
"""From the supervisor's death to a part's, whatever the part is doing."""
STOP_SECONDS = 3.0
"""From SIGTERM to a part's death."""
COLLECTION = (20_000, 20, 100)
"""How rarely to look for garbage in circles: parts make little of it, and a look goes through all of a node's books.
Small puts are some percent faster without."""
USER_MISTAKE = 2
"""Exit status where starting again cannot help."""

Work = Callable[[], Coroutine[None, None, None]]


class Doing(msgspec.Struct, frozen=True, tag=True):
    """What the part does before it is up, where that may take a while; fit for a user."""

    what: str


class Birth(msgspec.Struct, frozen=True, tag=True):
    """The part is up: it can be reached and serve. `conductor` is the address of one that it embeds, if it does."""

    part: PartId
    incarnation: Incarnation
    address: str
    conductor: str = ""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why the part ends, fit for a user."""

    message: str
    status: int


Report = Doing | Birth | Failure


def run_part(part: PartId, level: str, as_json: bool, prepare: Callable[[], Work]) -> int:
    """Prepare (load a model, say) and run until the work ends or a signal comes; the exit status.

    The caller must end the process with it at once and without waiting for threads (`leave`). Errors pass through.
    """
    log_to_stderr(part, level, as_json)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGTERM, signal.SIGINT})
    if LIFE_FD in os.environ:
        threading.Thread(target=_watch, args=(int(os.environ[LIFE_FD]),), name="life", daemon=True).start()
    work = prepare()
    # Modules and a model are there for good. A full look through them for garbage would stop everything for 0.1 s.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION)
    return _run_until_stopped(work)


def tell(what: str) -> None:
    """Tell the supervisor, if there is one, what takes a while."""
    _report(Doing(what))


def announce(me: Peer, conductor: str = "") -> None:
    """Tell the supervisor, if there is one, that this part is up."""
    _report(Birth(me.id, me.incarnation, me.address, conductor))
    log.info("listening at %s", me.address)


def fail(error: BaseException) -> int:
    """Say why the process ends, in one line, to the supervisor or on stderr; the exit status."""
    known = user_error(error)
    if known is None:
        message = one_line(error)
        log.error("ends: %s", message)
        failure = Failure(message, 1)
    else:
        failure = Failure(
            str(known), USER_MISTAKE if isinstance(known, ConfigError | JournalError | ModelError | TraceError) else 1
        )
    if not _report(failure):
        print(f"moonpool: {failure.message}", file=sys.stderr)
    return failure.status


def user_error(error: BaseException) -> MoonpoolError | None:
    """The MoonpoolError in it, also where a task group has wrapped it; None where something else went wrong too."""
    if isinstance(error, MoonpoolError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [user_error(member) for member in error.exceptions]
        return found[0] if all(found) else None
    return None


def leave(status: int) -> None:
    """End the process now. Threads that still compute or copy end with it; nobody is left to use their result."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def one_line(error: BaseException) -> str:
    """`ValueError: text (engine.py:12 step < decode.py:80 run)`: the innermost frame first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = reversed(traceback.extract_tb(error.__traceback__)[-8:])
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")


def log_to_stderr(part: str, level: str, as_json: bool) -> None:
    """One line an event, with the part's name in it."""
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(_JsonLine(part) if as_json else _TextLine(part))
    root = logging.getLogger()
    root.handlers[:] = [out]
    root.setLevel(logging.WARNING)
    logging.getLogger("moonpool").setLevel(level.upper())
    logging.captureWarnings(True)


class _TextLine(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower():7} {self._part:10} {_message(record)}"
        return legible(text)


class _JsonLine(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": record.created,
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": _message(record)[:MOST_CHARS],
        }
        return msgspec.json.encode(event).decode()


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        message += f" | {one_line(record.exc_info[1])}"
    return message


def _report(report: Report) -> bool:
    """False where no supervisor listens."""
    fd = os.environ.get(REPORT_FD)
    if fd is None:
        return False
    try:
        os.write(int(fd), msgspec.json.encode(report) + b"\n")
    except OSError:
        return False
    return True


def _watch(fd: int) -> None:
    """Wait for the pipe's end. The kernel's timer ends this process even if its event loop is stuck."""
    try:
        while os.read(fd, 1):
            pass
    except OSError as e:
        log.error("the supervisor's pipe: %s", e)
    signal.setitimer(signal.ITIMER_REAL, ORPHAN_SECONDS)
    log.warning("the supervisor is gone: this part ends")
    os.kill(os.getpid(), signal.SIGTERM)


def _run_until_stopped(work: Work) -> int:
    import uvloop

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    main = loop.create_task(work())
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            leave(128 + signal.SIGINT)
        stopping = True
        if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)
        main.cancel()

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop)
    try:
        loop.run_until_complete(main)
    except asyncio.CancelledError:
        if not stopping:
            raise
    except Exception:
        if not stopping:
            raise
        log.warning("not everything stopped cleanly", exc_info=True)
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=0.5))
    return 0
