"""`moonpool replay`: a trace sent to a real endpoint; figures in the terminal, as JSON, as one HTML file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.markup import escape

from moonpool.command.columns import compared, figures
from moonpool.command.replay_screen import Shown, facts_of, stopped_by_ctrl_c
from moonpool.command.simulate import FILE_COLUMNS
from moonpool.command.workload import Traffic, Workload
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.report.html import Page, page
from moonpool.report.live import Live
from moonpool.report.results import read_columns
from moonpool.report.rows import Column, differences
from moonpool.report.run import Run, live_run

if TYPE_CHECKING:
    from moonpool.bench.dialect import Api, Dialect, Wish
    from moonpool.bench.prompts import Words
    from moonpool.bench.tally import Tally
    from moonpool.trace.arrivals import Arrivals

INTERRUPTED = 130


class Wanted(msgspec.Struct, frozen=True):
    """The command line."""

    workload: Workload
    files: tuple[Path, ...] = ()
    url: str | None = None
    model: str = ""
    key: str = ""
    api: Api = "completions"
    prompts: str = "auto"
    """Or `ids`, or `text`."""
    tokenizer: str | None = None
    vocabulary: int | None = None
    rate: float | None = None
    sessions: bool = False
    think: float = 0.0
    ttft: float | None = None
    tbt: float | None = None
    send_limits: bool = False
    seed: int = 0
    warm_up: float = 0.0
    timeout: float = 600.0
    most_streams: int = 10_000
    name: str | None = None
    compare: bool = False
    html: Path | None = None
    out: Path | None = None
    as_json: bool = False


class ReplayReport(msgspec.Struct, frozen=True):
    """What `--json` prints; `runs` as of a simulation."""

    workload: Workload
    rate: float | None
    sessions: bool
    think: float
    warm_up: float
    interrupted: bool
    facts: tuple[str, ...]
    runs: tuple[Run, ...]


def replay(wanted: Wanted, tokenizer: Callable[[str], Path]) -> int:
    """Print what came of it. `tokenizer`: the directory of a model, by name or path.

    Raises ConfigError, TraceError, or MoonpoolError where the endpoint cannot be used at all.
    """
    from moonpool.bench.endpoint import base_of, room_for

    wanted = _sorted_out(wanted)
    others = read_columns(wanted.files)
    if not wanted.workload.source:
        return _show(wanted, (), others, None)
    traffic = Traffic(wanted.workload, wanted.workload.block_size)
    arrivals = traffic.requests(seed=wanted.seed)
    wish = _wish(wanted, tokenizer)
    most = room_for(wanted.most_streams)
    tally, dialect, interrupted = asyncio.run(_measure(wanted, arrivals, wish, most))
    if not len(tally.outcomes):
        if not interrupted:
            raise MoonpoolError(f"no request was measured: {_why_none(tally, wanted)}")
        print("interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    live = tally.live(base_of(str(wanted.url)), dialect)
    name = wanted.name or f"{urlsplit(live.endpoint).netloc} {dialect.model}"
    run = live_run(name, wanted.seed, Slo(wanted.ttft, wanted.tbt), tally.outcomes, live)
    facts = tuple(_shape_of(wanted, traffic, len(arrivals), live) + facts_of(run, tally, wanted.warm_up))
    report = ReplayReport(
        workload=wanted.workload,
        rate=wanted.rate,
        sessions=wanted.sessions,
        think=wanted.think,
        warm_up=wanted.warm_up,
        interrupted=interrupted,
        facts=facts,
        runs=(run,),
    )
    _show(wanted, facts, (Column(name, (run,)), *others), report)
    return INTERRUPTED if interrupted else 0


def _sorted_out(wanted: Wanted) -> Wanted:
    """The trace and reports may come in any order: a report ends in .json. Only reports: they are compared."""
    given = [wanted.workload.source, *map(str, wanted.files)]
    reports = [name for name in given if name.endswith(".json")]
    traces = [name for name in given if name not in reports]
    if len(traces) > 1:
        raise ConfigError(f"give one trace, {', '.join(traces)} are {len(traces)} of them; reports end in .json")
    if reports and not wanted.compare:
        raise ConfigError(f"{reports[0]} is a report: give --compare to show it beside others")
    if wanted.compare and not reports:
        raise ConfigError("--compare: give one or more reports, files ending in .json")
    if not traces and (wanted.url or wanted.out or wanted.as_json):
        raise ConfigError(
            "only reports are given, so nothing is sent: do without --url, --out and --json, or give a trace"
        )
    if traces and wanted.url is None:
        raise ConfigError(f"give --url: where is {traces[0]} to be sent?")
    if wanted.rate is not None and (wanted.workload.speed != 1.0 or wanted.workload.jitter):
        raise ConfigError("--rate draws the arrivals anew: it does not go with --speed or --jitter")
    if wanted.think and not wanted.sessions:
        raise ConfigError("--think is between the turns of conversations: give --sessions too")
    if wanted.send_limits and wanted.ttft is None and wanted.tbt is None:
        raise ConfigError("--send-limits: give --ttft or --tbt")
    return msgspec.structs.replace(
        wanted,
        workload=msgspec.structs.replace(wanted.workload, source="".join(traces)),
        files=tuple(Path(name) for name in reports),
    )


def _wish(wanted: Wanted, tokenizer: Callable[[str], Path]) -> Wish:
    """What prompts may be made of. Raises ConfigError or ModelError."""
    from moonpool.bench.dialect import Wish
    from moonpool.bench.prompts import ids_below

    if wanted.prompts == "ids" and wanted.api == "chat":
        raise ConfigError("--prompts ids: a chat is text; take --api completions")
    needs_text = wanted.prompts == "text" or wanted.api == "chat"
    if needs_text and wanted.tokenizer is None:
        raise ConfigError("prompts of text need the tokenizer of the endpoint's model: give --tokenizer MODEL")
    text, vocabulary = None, wanted.vocabulary
    if wanted.tokenizer is not None:
        text, known = _text(wanted.tokenizer, tokenizer)
        vocabulary = vocabulary or known
    return Wish(
        model=wanted.model,
        api=wanted.api,
        ids=None if needs_text else ids_below(vocabulary),
        text=None if wanted.prompts == "ids" else text,
    )


def _text(name: str, directory_of: Callable[[str], Path]) -> tuple[Words, int]:
    """Words of a tokenizer (its file, its directory, or a model's name), and how many token ids it has."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer needs the package tokenizers: pip install tokenizers, or moonpool with its extra `engine`"
        ) from None
    from moonpool.bench.prompts import text_words

    path = Path(name).expanduser()
    file = path if path.is_file() else (path if path.is_dir() else directory_of(name)) / "tokenizer.json"
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises no narrower class
        raise ConfigError(f"--tokenizer {name}: {file} is no tokenizer: {e}") from None
    found.no_truncation()
    found.no_padding()
    return text_words(found), found.get_vocab_size()


async def _measure(wanted: Wanted, arrivals: Arrivals, wish: Wish, most: int) -> tuple[Tally, Dialect, bool]:
    """What came of it, how it was put, and whether it was interrupted."""
    from moonpool.bench.dialect import find_dialect
    from moonpool.bench.endpoint import Endpoint, base_of
    from moonpool.bench.prompts import Prompts
    from moonpool.bench.replay import Replay, Rules
    from moonpool.bench.turns import Pace, turns

    async with Endpoint(base_of(str(wanted.url)), wanted.key, wanted.timeout) as endpoint:
        dialect = await find_dialect(endpoint, wish)
        words = wish.ids if dialect.as_ids else wish.text
        assert words is not None, "it was found with them"
        block = wanted.workload.block_size
        prompts = Prompts(words, block, wanted.seed, dialect.extra_tokens)
        limits = Slo(wanted.ttft, wanted.tbt) if wanted.send_limits else Slo()
        run = Replay(endpoint, dialect, prompts, Rules(wanted.warm_up, most, limits))
        pace = Pace(wanted.rate, wanted.sessions, wanted.think)
        with Shown(len(arrivals)) as shown, stopped_by_ctrl_c(run):
            tally = await run.run(turns(arrivals, pace, block, wanted.seed), shown.update)
        return tally, dialect, run.interrupted


def _shape_of(wanted: Wanted, traffic: Traffic, count: int, live: Live) -> list[str]:
    """What was sent."""
    workload = wanted.workload
    shaped = [f"speed {workload.speed:g}"] if workload.speed != 1 else []
    shaped += [f"jitter {workload.jitter:g} s"] if workload.jitter else []
    shaped += [f"Poisson arrivals, {wanted.rate:g} a second"] if wanted.rate else []
    shaped += [f"turns wait for answers ({live.held} did)"] if wanted.sessions else []
    shaped += [f"think time {wanted.think:g} s on average"] if wanted.think else []
    facts = [
        ", ".join([f"{workload.source}: {count} requests", *shaped, f"seed {wanted.seed}"]),
    ]
    if traffic.failed:
        facts.append(f"{traffic.failed} requests without an answer in the trace were left out")
    if traffic.skipped:
        facts.append(f"{traffic.skipped} malformed lines were left out, the first: {traffic.first_skipped}")
    return facts


def _why_none(tally: Tally, wanted: Wanted) -> str:
    return "all came in the warm-up, shorten --warm-up" if wanted.warm_up else f"{tally.sent} were sent"


def _show(wanted: Wanted, facts: Sequence[str], columns: Sequence[Column], report: ReplayReport | None) -> int:
    if wanted.html is not None:
        _write("--html", wanted.html, page(Page("Moonpool: replay", tuple(facts), tuple(columns))).encode())
    text = msgspec.json.format(msgspec.json.encode(report)) + b"\n" if report is not None else b""
    if wanted.out is not None:
        _write("--out", wanted.out, text)
    if wanted.as_json and report is not None:
        sys.stdout.write(text.decode())
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    for fact in facts:
        console.print(escape(fact), soft_wrap=True)
    console.print(figures(columns))
    if differences(columns):
        console.print(f"more than {escape(columns[0].name)}:")
        console.print(compared(columns))
    for file in (wanted.html, wanted.out):
        if file is not None:
            console.print(f"written: {escape(str(file))}")
    return 0


def _write(flag: str, file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as e:
        raise ConfigError(f"{flag} {file}: {e.strerror}") from None
