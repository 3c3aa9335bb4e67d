"""What is sent to a simulated cluster: a trace, shaped by flags that all commands share which take one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from moonpool.errors import ConfigError, TraceError
from moonpool.trace.arrivals import Arrivals, extent
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest

if TYPE_CHECKING:
    from moonpool.trace.index import Index
    from moonpool.trace.synthesize import Synthetic

PANEL = "What is sent"
SOURCE = "Mooncake JSONL, Azure or BurstGPT CSV; or synthetic:KIND?name=value&… (see `moonpool trace kinds`)."
MOST = 1e3
"""And least: its inverse."""


class Workload(msgspec.Struct, frozen=True):
    """The flags, in the order in which they apply. Times are seconds of the trace before it is sped up."""

    source: str
    skip_bad: bool = False
    block_size: int = 512
    begin: float = 0.0
    until: float | None = None
    first: int | None = None
    scale_input: float = 1.0
    scale_output: float = 1.0
    jitter: float = 0.0
    speed: float = 1.0


class Traffic:
    """A workload. What is small is read or drawn once, when this is made; else anew whenever it is asked for, so that
    no more than arrivals and places in the file are kept, however long it is."""

    def __init__(self, workload: Workload, block_tokens: int) -> None:
        """`block_tokens`: of the cluster that it is for. Raises ConfigError or TraceError."""
        from moonpool.trace.index import few

        if workload.until is not None and workload.until <= workload.begin:
            raise ConfigError(f"--until {workload.until:g} must be later than --from {workload.begin:g}")
        if workload.block_size % block_tokens:
            raise ConfigError(
                f"--block-size {workload.block_size}: must be a multiple of the hardware's own, {block_tokens} tokens"
            )
        self.workload = workload
        self.block_tokens = block_tokens
        self.skipped, self.failed, self.first_skipped = 0, 0, ""
        self._extents: dict[tuple[float, int, int | None], tuple[int, float, float]] = {}
        """By speed, seed and how many at most: their number, the first and the last arrival."""
        self._synthetic = _synthetic(workload)
        self._index = None if self._synthetic else self._file()
        self._kept = few(self._drawn()) if self._synthetic else None

    def _file(self) -> Index:
        from moonpool.trace.index import Index

        path = Path(self.workload.source)
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise TraceError(f"{path} is no file; a trace is read more than once: write it to a file first")
        trace = TraceFile(path, self.workload.skip_bad)
        index = Index(trace)
        self.skipped, self.failed, self.first_skipped = trace.skipped, trace.failed, trace.first_skipped
        return index

    def requests(self, speed: float | None = None, seed: int = 0, first: int | None = None) -> Arrivals:
        """In order of arrival, from time 0. `seed`: of the jitter. `first`: so many at most.

        Raises TraceError where no request is left.
        """
        speed = self.workload.speed if speed is None else speed
        key = speed, seed, first
        if key not in self._extents:
            self._extents[key] = extent(islice(self._shaped(self._times(), speed, seed, bare=True), first))
        count, begin, end = self._extents[key]
        if not count:
            raise TraceError(f"{self.workload.source} has no requests between --from and --until")
        return Arrivals(lambda: islice(self._shaped(self._source(), speed, seed), first), count, begin, end)

    def _shaped(
        self, requests: Iterable[TraceRequest], speed: float, seed: int, bare: bool = False
    ) -> Iterator[TraceRequest]:
        """`bare`: only their arrivals are asked for."""
        from moonpool.trace.shape import Shape, reshape, split_blocks

        wanted = self.workload
        shape = Shape(
            begin=wanted.begin,
            until=wanted.until,
            first=wanted.first,
            scale_input=1.0 if bare else wanted.scale_input,
            scale_output=1.0 if bare else wanted.scale_output,
            jitter=wanted.jitter,
            speed=speed,
        )
        shaped = reshape(requests, shape, wanted.block_size, seed)
        if wanted.block_size == self.block_tokens or bare:
            return shaped
        return split_blocks(shaped, wanted.block_size, self.block_tokens)

    def _source(self) -> Iterable[TraceRequest]:
        return self._index or self._kept or self._drawn()

    def _times(self) -> Iterable[TraceRequest]:
        return self._index.times() if self._index else self._source()

    def _drawn(self) -> Iterator[TraceRequest]:
        from moonpool.trace.synthesize import synthesize

        assert self._synthetic is not None
        return synthesize(self._synthetic)


def _synthetic(workload: Workload) -> Synthetic | None:
    """None where it is a file."""
    from moonpool.trace.kinds import PREFIX, parse_kind

    if not workload.source.startswith(PREFIX):
        return None
    found = parse_kind(workload.source.removeprefix(PREFIX))
    count = found.requests if workload.first is None or workload.begin else min(found.requests, workload.first)
    return msgspec.structs.replace(found, block_tokens=workload.block_size, requests=count)


def with_workload(command: Callable[..., int]) -> Callable[..., int]:
    """Replace `command`'s parameter `workload` by the argument FILE and the flags that shape what it holds."""
    return _with(command, _FLAGS)


def with_trace(command: Callable[..., int]) -> Callable[..., int]:
    """The same with --trace FILE."""
    named = Annotated[str, typer.Option("--trace", metavar="FILE", help=SOURCE, rich_help_panel=PANEL)]
    return _with(command, _FLAGS | {"source": (named, inspect.Parameter.empty)})


def _with(command: Callable[..., int], flags: dict[str, tuple[object, object]]) -> Callable[..., int]:
    def run(**given: Any) -> int:
        workload = Workload(**{name: given.pop(name) for name in flags})
        return command(workload=workload, **given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [
        *(_keyword(name, annotation, default) for name, (annotation, default) in flags.items()),
        *(_keyword(p.name, p.annotation, p.default) for p in own if p.name != "workload"),
    ]
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(flag: str, text: str, least: float = 1 / MOST, most: float | None = MOST) -> Any:
    return typer.Option(flag, min=least, max=most, help=text, rich_help_panel=PANEL)


_FLAGS: dict[str, tuple[object, object]] = {
    "source": (
        Annotated[str, typer.Argument(metavar="FILE", help=SOURCE)],
        inspect.Parameter.empty,
    ),
    "skip_bad": (
        Annotated[
            bool,
            typer.Option("--skip-bad", help="Leave malformed lines out and count them.", rich_help_panel=PANEL),
        ],
        False,
    ),
    "block_size": (
        Annotated[
            int,
            typer.Option(
                "--block-size",
                min=1,
                max=1 << 20,
                help="Tokens in a block of the trace's ids.",
                rich_help_panel=PANEL,
            ),
        ],
        512,
    ),
    "begin": (Annotated[float, _option("--from", "Begin so many seconds after the trace does.", 0.0, 1e12)], 0.0),
    "until": (Annotated[float | None, _option("--until", "End so many seconds after it begins.", 0.0, 1e12)], None),
    "first": (
        Annotated[int | None, typer.Option(min=1, help="Take only so many requests.", rich_help_panel=PANEL)],
        None,
    ),
    "scale_input": (Annotated[float, _option("--scale-input", "How much longer prompts are, shared parts too.")], 1.0),
    "scale_output": (Annotated[float, _option("--scale-output", "How much longer answers are.")], 1.0),
    "jitter": (
        Annotated[
            float,
            _option("--jitter", "Each request comes up to so many seconds later, drawn by --seed.", 0.0, 1e6),
        ],
        0.0,
    ),
    "speed": (Annotated[float, _option("--speed", "How much faster requests arrive.")], 1.0),
}
"""Parameter: its annotation and its default."""
