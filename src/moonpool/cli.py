"""The command. The only module that names concrete classes: here the parts are put together.

Imports of what is heavy happen inside the commands, so that `moonpool --help` answers at once.
It is longer than other modules because each part's whole composition stands in one place.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moonpool import __version__
from moonpool.command.flags import with_flags
from moonpool.command.workload import Workload, with_trace, with_workload
from moonpool.config import Config
from moonpool.core.vocabulary import PartId, Slo
from moonpool.errors import ConfigError, StageLostError
from moonpool.interrupts import heed_interrupts

if TYPE_CHECKING:
    from moonpool.command.instances import External
    from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
    from moonpool.core.settings import ConductorConfig
    from moonpool.engine.pipeline import StageEngine
    from moonpool.live.kv_events.stream import StreamConfig
    from moonpool.live.process import Work
    from moonpool.sim.profile import Profile
    from moonpool.wire.link import Link
    from moonpool.wire.recorder import JournalConfig

log = logging.getLogger(__name__)

app = typer.Typer(
    help="Serve language models from prefill and decode pools around one shared KVCache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

trace_app = typer.Typer(help="Look at request traces and replay them.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
journal_app = typer.Typer(help="Look into the Conductor's journal.", no_args_is_help=True)
app.add_typer(journal_app, name="journal")
keys_app = typer.Typer(help="API keys of gateways.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")

TraceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Mooncake JSONL, Azure or BurstGPT CSV.")]
BlockSize = Annotated[
    int, typer.Option("--block-size", min=1, max=1 << 20, help="Tokens in a block of the trace's ids.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeysFile = Annotated[Path, typer.Option("--keys", metavar="FILE", help="The file with the keys.")]

OF_NODES = ("dram-per-node", "eviction", "ssd-per-node", "ssd-dir", "lease-limit", "client-quota")
"""What a worker's node has, not the worker."""
CLUSTER = ("model", "fleet", "pool", "batch", "front", "placement", "events", "journal", "log")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"moonpool {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command. A user's mistake is one line on stderr and exit status 2."""
    heed_interrupts()
    try:
        status = app(prog_name="moonpool", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        status = 1
    except Exception as e:
        status = _failed(e)
    from moonpool.live.process import leave

    leave(status if isinstance(status, int) else 0)


@app.command()
@with_flags(*CLUSTER)
def serve(config: Config, token: str | None) -> int:
    """Run a whole cluster on this machine: gateway, Conductor, nodes, prefill and decode workers."""
    from moonpool.command.serve import serve as run

    return run(config, token, _weights)


@app.command(rich_help_panel="Parts, each started alone")
@with_flags("part", "front", "external", "model", "placement", "events", "journal", "log", others=CLUSTER)
def gateway(config: Config, token: str | None) -> int:
    """A gateway; without --conductor it embeds the Conductor, which other parts then join at --control-port.

    With --instances it serves from vLLM servers that run already.
    """
    return _run(config, "gateway-0", partial(_gateway, config, token))


@app.command(rich_help_panel="Parts, each started alone")
@with_flags(
    *("part", "placement", "events", "journal", "log"),
    others=CLUSTER,
    without=("conductor", "node", "data-port", "run-dir"),
)
def conductor(config: Config, token: str | None) -> int:
    """The Conductor alone: the global scheduler that all parts join."""
    return _run(config, "conductor", partial(_conductor_alone, config, token))


@app.command(rich_help_panel="Parts, each started alone")
@with_flags(
    *("part", "pool", "log"),
    others=CLUSTER,
    without=("node", "block-size", "prefill-pages", "decode-pages"),
)
def node(config: Config, token: str | None) -> int:
    """A node: this machine's arena of KVCache blocks."""
    return _run(config, "node-0", partial(_node, config, token))


@app.command(rich_help_panel="Parts, each started alone")
@with_flags(
    *("part", "stage", "model", "pool", "batch", "log"),
    others=CLUSTER,
    without=(*OF_NODES, "decode-pages", "max-batch", "coupled-mode"),
)
def prefill(config: Config, token: str | None) -> int:
    """A prefill worker, or a stage of one that is a pipeline, beside a node on the same machine."""
    if config.stage.stage:
        default = f"{config.stage.leader or 'prefill-0'}.{config.stage.stage}"
        return _run(config, default, partial(_stage, config, token))
    return _run(config, "prefill-0", partial(_prefill, config, token))


@app.command(rich_help_panel="Parts, each started alone")
@with_flags(
    *("part", "model", "pool", "batch", "log"),
    others=CLUSTER,
    without=(*OF_NODES, "prefill-pages", "prefill-chunk", "pipeline", "pipeline-chunk", "coupled-mode"),
)
def decode(config: Config, token: str | None) -> int:
    """A decode worker, beside a node on the same machine."""
    return _run(config, "decode-0", partial(_decode, config, token))


@app.command(rich_help_panel="Parts, each started alone")
@with_flags(
    *("part", "model", "pool", "batch", "log"),
    others=CLUSTER,
    without=(*OF_NODES, "prefill-pages", "pipeline", "pipeline-chunk"),
)
def coupled(config: Config, token: str | None) -> int:
    """A worker that prefills and decodes, beside a node on the same machine."""
    return _run(config, "coupled-0", partial(_coupled, config, token))


@app.command()
def pull(name: Annotated[str, typer.Argument(help="The model's name.")] = "smollm2") -> int:
    """Download a model, check it and convert it, once; afterwards it is used offline."""
    from moonpool.engine.model import pull as run

    print(run(name))
    return 0


@app.command()
def status(
    url: Annotated[str, typer.Option(help="The gateway.")] = "http://127.0.0.1:8000",
    once: Annotated[
        bool, typer.Option("--once", help="Print one table and end, as where the output is no terminal.")
    ] = False,
) -> int:
    """A live table of the cluster's parts, requests and KVCache."""
    from moonpool.command.status import status as run

    return run(url, once)


@app.command()
def doctor(
    host: Annotated[str, typer.Option(help="The address to check.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to check.", min=0, max=65535)] = 8000,
) -> int:
    """Say what this machine lacks to run a cluster; exit status 1 if something essential is missing."""
    from moonpool.command.doctor import doctor as run

    return run(host, port)


@trace_app.command("hits")
def trace_hits(
    file: TraceArgument,
    capacity: Annotated[
        str, typer.Option(help="Blocks in the pool: numbers like 500, 30k, 2m, inf, with commas between.")
    ] = "inf,100k,50k,30k,10k,1k",
    policy: Annotated[
        str, typer.Option(help="What a full pool gives up first: policies, with commas between.")
    ] = "lru,lfu,length-aware",
    block_size: BlockSize = 512,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    jobs: Annotated[int, typer.Option(min=0, max=64, help="Processes; 0: as many as cores.")] = 0,
) -> int:
    """What share of a trace's prompts one pool would hold, by capacity and eviction policy."""
    from moonpool.command.trace import hits as run

    return run(file, capacity, policy, block_size, skip_bad, as_json, jobs)


@trace_app.command("describe")
def trace_describe(
    file: TraceArgument, block_size: BlockSize = 512, skip_bad: SkipBad = False, as_json: AsJson = False
) -> int:
    """How many requests a trace has, how long they are, how they arrive and what they share."""
    from moonpool.command.trace import describe as run

    return run(file, block_size, skip_bad, as_json)


@trace_app.command("generate")
def trace_generate(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="One of `moonpool trace kinds`, as KIND?name=value&…")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Mooncake JSONL, written anew.")],
    requests: Annotated[int | None, typer.Option(min=1, help="How many (n).")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all that is drawn.")] = None,
    block_size: BlockSize = 512,
) -> int:
    """Write a trace of synthetic requests."""
    from moonpool.command.generate import generate

    return generate(kind, out, {"n": requests, "rate": rate, "seed": seed}, block_size)


@trace_app.command("kinds")
def trace_kinds() -> int:
    """The kinds of synthetic requests and their parameters."""
    from moonpool.command.generate import kinds

    return kinds()


@app.command()
@with_workload
def simulate(
    workload: Workload,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[CONFIGURATION.yaml]...", help="What --compare compares.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run configurations given as YAML files; flags stand for what they lack.")
    ] = False,
    hardware: Annotated[str, typer.Option(help="A hardware profile, or a YAML file with one.")] = "a800-llama2-70b",
    prefill: Annotated[int, typer.Option(min=1, max=4096, help="Prefill instances.")] = 8,
    decode: Annotated[int, typer.Option(min=1, max=4096, help="Decode instances.")] = 8,
    placement: Annotated[str, typer.Option(help="Policies to compare, with commas between.")] = "kvcache-centric",
    admission: Annotated[str, typer.Option(help="Policies to compare, with commas between.")] = "forecast",
    threshold: Annotated[float, typer.Option(min=1.0, help="Of algorithm-1, see the key fetch-threshold.")] = 1.0,
    ttft: Annotated[float | None, typer.Option(help="Limit on the time to first token, seconds.")] = None,
    tbt: Annotated[float | None, typer.Option(help="Limit on the time between tokens, seconds.")] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", "--seed", help="Of what is drawn; several, with commas between, give intervals.")
    ] = "0",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file with charts.")] = None,
    classes: Annotated[str | None, typer.Option(metavar="FILE", help="YAML file with priority classes.")] = None,
    mix: Annotated[
        str | None, typer.Option(help="Who asks for which: high=0.3,low=0.7 (default: equal parts).")
    ] = None,
    as_json: AsJson = False,
    jobs: Annotated[int, typer.Option(min=0, max=64, help="Processes; 0: as many as cores.")] = 0,
    pipeline: Annotated[
        int, typer.Option(min=1, max=64, help="So many prefill machines form one instance and share the layers.")
    ] = 1,
    coupled: Annotated[int, typer.Option(min=0, max=4096, help="Compare with so many coupled workers.")] = 0,
    coupled_mode: Annotated[
        str, typer.Option(help="How they mix: prefill-first, one-at-a-time, chunked; with commas between.")
    ] = "chunked",
    chunk: Annotated[str, typer.Option(help="Tokens of a chunked step; several with commas between.")] = "512",
    routing: Annotated[
        str, typer.Option(help="Of requests to them: round-robin, prefix-affine; with commas between.")
    ] = "prefix-affine",
    slow_down: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="The hardware is so many times slower, as of serve --slow-down.")
    ] = 1.0,
    shrink_kv: Annotated[float, typer.Option(min=1.0, max=1e6, help="And has so many times fewer bytes of KV.")] = 1.0,
) -> int:
    """Replay a trace on a simulated cluster, with the very scheduler that serves."""
    from moonpool.command.simulate import Wanted
    from moonpool.command.simulate import simulate as run

    wanted = Wanted(
        workload=workload,
        files=tuple(files or ()),
        compare=compare,
        hardware=hardware,
        prefill=prefill,
        decode=decode,
        placement=placement,
        admission=admission,
        threshold=threshold,
        ttft=ttft,
        tbt=tbt,
        seeds=seeds,
        html=html,
        as_json=as_json,
        jobs=jobs,
        classes=classes,
        mix=mix,
        pipeline=pipeline,
        coupled=coupled,
        coupled_mode=coupled_mode,
        chunk=chunk,
        routing=routing,
        slow_down=slow_down,
        shrink_kv=shrink_kv,
    )
    return run(wanted)


@app.command()
@with_workload
def replay(
    workload: Workload,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[REPORT.json]...", help="What --compare shows beside it.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The endpoint, like http://127.0.0.1:8000; /v1 may be left out.")
    ] = None,
    model: Annotated[str, typer.Option(help="Its name there (default: the first that the endpoint names).")] = "",
    api_key: Annotated[
        str, typer.Option(envvar=["MOONPOOL_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
    ] = "",
    api: Annotated[Literal["completions", "chat"], typer.Option(help="Which of the two to ask.")] = "completions",
    prompts: Annotated[
        Literal["auto", "ids", "text"], typer.Option(help="Of token ids or of text; auto: ids where they are taken.")
    ] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="For prompts of text: a model, its directory or tokenizer.json.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Token ids there are, where they are fewer than 32000.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1e6, help="Poisson arrivals, so many a second, in place of the trace's."),
    ] = None,
    sessions: Annotated[
        bool, typer.Option("--sessions", help="A turn of a conversation waits for the answer to the one before.")
    ] = False,
    think: Annotated[
        float, typer.Option(min=0.0, max=1e6, help="Mean seconds from that answer to the turn (exponential).")
    ] = 0.0,
    ttft: Annotated[float | None, typer.Option(help="Limit on the time to first token, seconds.")] = None,
    tbt: Annotated[float | None, typer.Option(help="Limit on the time between tokens, seconds.")] = None,
    send_limits: Annotated[
        bool, typer.Option("--send-limits", help="Send both with each request, for a Moonpool gateway to go by.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 32) - 1, help="Of arrivals, think times, and what prompts are made of.")
    ] = 0,
    warm_up: Annotated[
        float, typer.Option(min=0.0, help="Requests of so many seconds at the beginning are not measured.")
    ] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which an answer is given up.")] = 600.0,
    most_streams: Annotated[int, typer.Option(min=1, max=1 << 20, help="Requests under way at one time.")] = 10_000,
    name: Annotated[str | None, typer.Option(help="Of the column in reports (default: host and model).")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show reports (--out, or simulate --json) beside it, or them alone.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file with charts.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON to a file as well.")] = None,
    as_json: AsJson = False,
) -> int:
    """Send a trace to an OpenAI-compatible endpoint, when each request is due, and measure what comes of it."""
    from moonpool.command.replay import Wanted
    from moonpool.command.replay import replay as run

    wanted = Wanted(
        workload=workload,
        files=tuple(files or ()),
        url=url,
        model=model,
        key=api_key,
        api=api,
        prompts=prompts,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        rate=rate,
        sessions=sessions,
        think=think,
        ttft=ttft,
        tbt=tbt,
        send_limits=send_limits,
        seed=seed,
        warm_up=warm_up,
        timeout=timeout,
        most_streams=most_streams,
        name=name,
        compare=compare,
        html=html,
        out=out,
        as_json=as_json,
    )
    return run(wanted, _model_directory)


@app.command()
def record(
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Written anew, as Mooncake JSONL.")],
    journal: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A segment, or a directory of them (default: serve's own).")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Tokens of an id's block (default: the cluster's own).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only requests for this one.")] = None,
) -> int:
    """Turn a live cluster's journal into a trace: arrivals, lengths and numbered blocks, never text."""
    from moonpool.command.record import record as run

    return run(out, journal, block_size, model)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="An x-request-id, or a request's own id.")],
    url: Annotated[str, typer.Option(help="The gateway.")] = "http://127.0.0.1:8000",
    journal: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Ask no cluster, read this journal: a directory or a segment.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Tell a request's story: why it was held, placed where it was, or refused; from the cluster or its journal."""
    from moonpool.command.explain import explain as run

    return run(request, url, journal, as_json)


@journal_app.command("replay")
def journal_replay(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A segment, or a directory of them (default: serve's own).")
    ] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also what other code wrote.")] = False,
) -> int:
    """Decide again what a live Conductor decided, and compare to the byte; exit status 1 at a difference."""
    from moonpool.command.journal import replay as run

    return run(path, anyway)


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is.")],
    keys: KeysFile,
    admin: Annotated[bool, typer.Option("--admin", help="It may look at the cluster and change it.")] = False,
    group: Annotated[
        str | None, typer.Option(help="Keys of one group share KVCache (default: it shares with no other key).")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option("--class", help="Priority classes that it may name, the default first, with commas between."),
    ] = None,
    slo_ttft: Annotated[str | None, typer.Option(help="Limit on time to first token, before its class's.")] = None,
    slo_tbt: Annotated[str | None, typer.Option(help="Limit on time between tokens, before its class's.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, max=1 << 40, help="Most requests a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, max=1 << 40, help="Most tokens a minute, prompts and answers.")
    ] = None,
    streams: Annotated[int | None, typer.Option(min=1, max=1 << 40, help="Most answers at one time.")] = None,
) -> int:
    """Make a key and print it. The file, made if it is not there, keeps its hash alone; gateways take it at once."""
    from moonpool.command.keys import Wanted, add

    wanted = Wanted(
        name=name,
        admin=admin,
        group=group,
        classes=classes,
        slo_ttft=slo_ttft,
        slo_tbt=slo_tbt,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        streams=streams,
    )
    return add(keys, wanted)


@keys_app.command("list")
def keys_list(keys: KeysFile, as_json: AsJson = False) -> int:
    """The keys of a file and what they may; never a secret."""
    from moonpool.command.keys import list_

    return list_(keys, as_json)


@keys_app.command("revoke")
def keys_revoke(id_: Annotated[str, typer.Argument(metavar="ID", help="Of the key.")], keys: KeysFile) -> int:
    """Take a key out. Gateways refuse it within a second, and end what it has under way."""
    from moonpool.command.keys import revoke

    return revoke(keys, id_)


ProfileFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where the profile goes (default: the one that is `local`).")
]


@app.command()
@with_flags("model", "fleet", "pool", "batch", others=CLUSTER, own={"out": ProfileFile})
def calibrate(config: Config, token: str | None, out: Path | None) -> int:
    """Measure this machine's engine, memory, sockets and disk for about a minute: the hardware profile `local`.

    As many other engines compute meanwhile as `serve` would have workers: they share this machine's cores and memory.
    """
    from moonpool.command.calibrate import calibrate as run

    return run(config, partial(_engine, config), out=out)


@app.command()
@with_trace
def plan(
    workload: Workload,
    slo: Annotated[str, typer.Option(metavar="LIMITS", help="ttft=30s,tbt=100ms, or one of them.")],
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Machines to divide.")],
    hardware: Annotated[str, typer.Option(help="A hardware profile, or a YAML file with one.")] = "a800-llama2-70b",
    pipelines: Annotated[
        str, typer.Option(help="Prefill machines that may form one instance, with commas between.")
    ] = "1,2,4",
    dram: Annotated[
        str | None,
        typer.Option(help="Tokens of DRAM a machine to weigh: 750k,3M (default: the hardware's and others)."),
    ] = None,
    placement: Annotated[str, typer.Option(help="The policy that it is planned for.")] = "kvcache-centric",
    admission: Annotated[str, typer.Option(help="The policy that it is planned for.")] = "forecast",
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn; the same for every split.")] = 0,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Then look at every split on the whole trace too, and compare.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best as YAML for simulate --compare.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file with charts.")] = None,
    as_json: AsJson = False,
    jobs: Annotated[int, typer.Option(min=0, max=64, help="Processes; 0: as many as cores.")] = 0,
) -> int:
    """Find the split into prefill and decode machines, and the pipelines, with the highest goodput within limits."""
    from moonpool.command.plan import make_plan
    from moonpool.command.planning import Wanted

    wanted = Wanted(
        workload=workload,
        slo=slo,
        nodes=nodes,
        hardware=hardware,
        pipelines=pipelines,
        dram=dram,
        placement=placement,
        admission=admission,
        seed=seed,
        exhaustive=exhaustive,
        out=out,
        html=html,
        as_json=as_json,
        jobs=jobs,
    )
    return make_plan(wanted)


@app.command()
@with_workload
def goodput(
    workload: Workload,
    hardware: Annotated[str, typer.Option(help="A hardware profile, or a YAML file with one.")] = "a800-llama2-70b",
    prefill: Annotated[int, typer.Option(min=1, max=4096, help="Prefill machines.")] = 8,
    decode: Annotated[int, typer.Option(min=1, max=4096, help="Decode machines.")] = 8,
    pipeline: Annotated[
        int, typer.Option(min=1, max=64, help="So many prefill machines form one instance and share the layers.")
    ] = 1,
    against: Annotated[
        str, typer.Option(help="Placements that the default is measured against, with commas between.")
    ] = "algorithm-1,cache-aware,load-balance,lmetric,dynamo,random",
    admission: Annotated[
        str, typer.Option(help="Admission policies that each of those has, with commas between.")
    ] = "early,predictive,forecast",
    ttft: Annotated[float, typer.Option(min=1e-3, help="Limit on the time to first token, seconds.")] = 30.0,
    tbt: Annotated[float, typer.Option(min=1e-4, help="Limit on the time between tokens, seconds.")] = 0.1,
    seeds: Annotated[str, typer.Option(help="Of the arrivals' jitter; several, with commas between.")] = "1,2,3,4,5",
    start: Annotated[float, typer.Option(min=1e-3, max=1e3, help="The speed that is looked at first.")] = 2.0,
    overload: Annotated[
        float, typer.Option(min=1.0, max=100.0, help="So many times the best other's 90 % point is overload.")
    ] = 2.0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file with charts.")] = None,
    as_json: AsJson = False,
    jobs: Annotated[int, typer.Option(min=0, max=64, help="Processes; 0: as many as cores.")] = 0,
) -> int:
    """What the default policies serve within the limits, beside all others: at the 90 % point and in overload."""
    from moonpool.command.goodput import Wanted, measure

    return measure(
        Wanted(
            workload=workload,
            hardware=hardware,
            prefill=prefill,
            decode=decode,
            pipeline=pipeline,
            placement=against,
            admission=admission,
            ttft=ttft,
            tbt=tbt,
            seeds=seeds,
            start=start,
            overload=overload,
            html=html,
            as_json=as_json,
            jobs=jobs,
        )
    )


@app.command()
def paper(
    traces: Annotated[Path, typer.Option(metavar="DIR", help="A folder with the traces.")],
    hardware: Annotated[str, typer.Option(help="A hardware profile, or a YAML file with one.")] = "a800-llama2-70b",
    prefill: Annotated[int, typer.Option(min=1, max=4096, help="Prefill instances.")] = 8,
    decode: Annotated[int, typer.Option(min=1, max=4096, help="Decode instances.")] = 8,
    seeds: Annotated[str, typer.Option(help="Of the arrivals' jitter; several, with commas between.")] = "1,2,3,4,5",
    first: Annotated[int | None, typer.Option(min=1, help="Take only so many requests.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All of the trace with each seed, not a slice; every placement policy.")
    ] = False,
    coupled: Annotated[
        bool, typer.Option("--coupled", help="Only the figures beside coupled workers: hundreds of searches.")
    ] = False,
    as_json: AsJson = False,
    jobs: Annotated[int, typer.Option(min=0, max=64, help="Processes; 0: as many as cores.")] = 0,
) -> int:
    """The Mooncake paper's figures beside what this scheduler makes of the traces, with a comment on each."""
    from moonpool.command.paper import Wanted
    from moonpool.command.paper import paper as run

    return run(Wanted(traces, hardware, prefill, decode, seeds, first, as_json, jobs, full, coupled))


@app.command(hidden=True)
def check_model(
    model: Path,
    dtype: Annotated[str, typer.Option()] = "float32",
    quantize: Annotated[str, typer.Option()] = "none",
) -> int:
    """Say in one line why the torch engine does not take this model directory; `serve` runs it before it starts."""
    from moonpool.engine.families import inspect
    from moonpool.engine.loading import load_config

    config = load_config(model)
    inspect(config, model.name)
    if quantize != "none":
        from moonpool.engine.quantize import check_supported

        check_supported(config, model.name, dtype)
    return 0


@app.command()
def version() -> int:
    """Print the version."""
    print(f"moonpool {__version__}")
    return 0


def _model_directory(name: str) -> Path:
    from moonpool.engine.model import resolve

    return resolve(name)


def _failed(error: Exception) -> int:
    """One line for any error; for a mistake in the command line also where help is."""
    from moonpool.command.machine import ENGINE_PACKAGES, check_packages
    from moonpool.live.process import fail

    if isinstance(error, ModuleNotFoundError) and error.name in ENGINE_PACKAGES:
        try:
            check_packages()
        except ConfigError as e:
            return fail(e)
    if not hasattr(error, "format_message"):
        return fail(error)
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 0
    where = f" (see {context.command_path} --help)" if context else ""
    return fail(ConfigError(" ".join(error.format_message().split()).rstrip(".") + where))


def _run(config: Config, default: str, prepare: Callable[[PartId], Work]) -> int:
    from moonpool.live.process import run_part

    part = PartId(config.part.id or default)
    return run_part(part, config.log.log_level, config.log.log_json, lambda: prepare(part))


def _gateway(config: Config, token: str | None, part: PartId) -> Work:
    from moonpool.command.caching import caching_directory
    from moonpool.gateway.config import GatewayConfig
    from moonpool.gateway.keys.file import check_keys
    from moonpool.gateway.serve import listen, run_gateway
    from moonpool.live.conductor import run_conductor

    check_keys(config.front.keys, config.front.host)
    external = _external(config)
    if external is not None:
        config = external.named(config)
    settings = GatewayConfig(
        host=config.front.host,
        port=config.front.port,
        model_path=str(external.tokenizer if external is not None else _weights(config)),
        served_model_name=config.served_name,
        request_timeout=config.front.request_timeout,
        max_requests=config.front.max_requests,
        classes=config.placement.classes,
        caching_dir=caching_directory(config.front.caching_dir, part, config.front.port),
        caching_quota=config.front.caching_quota,
        allowed_hosts=tuple(name.strip() for name in config.front.allowed_hosts.split(",") if name.strip()),
        keys=config.front.keys,
    )
    rules, journal, events = _rules(config), _journal(config), _events(config)
    listener = listen(config.front.host, config.front.port)

    async def serve(link: Link, conductor: str) -> None:
        async with asyncio.TaskGroup() as group:
            registry = None
            if external is not None:
                from moonpool.command.registrar import registry_of
                from moonpool.live.external.run import Instances

                instances = Instances(external.instances, conductor, partial(_link, config, token))
                registry = registry_of(external, instances)
                group.create_task(instances.run())
            group.create_task(run_gateway(link, conductor, settings, listener, registry, token))

    async def work() -> None:
        if config.part.conductor is not None:
            with _open(part, config, token, config.part.control_port) as link:
                await serve(link, _conductor(config))
            return
        with (
            _open(PartId("conductor"), config, token, config.part.control_port, is_up=False) as chief,
            _open(part, config, token, 0, conducts=chief.me.address) as link,
        ):
            async with asyncio.TaskGroup() as group:
                group.create_task(run_conductor(chief, rules, journal=journal, events=events, token=token))
                group.create_task(serve(link, chief.me.address))

    return work


def _conductor_alone(config: Config, token: str | None, part: PartId) -> Work:
    from moonpool.live.conductor import run_conductor
    from moonpool.live.process import announce

    rules, journal, events = _rules(config), _journal(config), _events(config)

    async def work() -> None:
        with _open(part, config, token, config.part.control_port, is_up=False) as link:
            announce(link.me, conductor=link.me.address)
            await run_conductor(link, rules, journal=journal, events=events, token=token)

    return work


def _node(config: Config, token: str | None, part: PartId) -> Work:
    from moonpool.command.machine import ssd_directories
    from moonpool.live.process import LIFE_FD, RESTART, announce, tell
    from moonpool.live.rundir import create_run_directory
    from moonpool.store.node import NodeConfig, run_node

    address = _conductor(config)
    directories = tuple(map(str, ssd_directories(config)))

    async def work() -> None:
        own = None if config.part.run_dir else create_run_directory()
        try:
            settings = NodeConfig(
                dram_bytes=config.pool.dram_per_node,
                run_dir=config.part.run_dir or str(own.path if own else ""),
                data_host=config.part.bind,
                data_port=config.part.data_port,
                token=token,
                eviction=config.pool.eviction,
                pin_share=config.pool.caching_share,
                ssd_bytes=config.pool.ssd_per_node,
                ssd_dirs=directories,
                is_restart=bool(os.environ.get(RESTART)),
                lease_seconds=config.pool.lease_limit,
                client_quota=config.pool.client_quota,
                life_fd=int(life) if (life := os.environ.get(LIFE_FD)) else None,
            )
            with _open(part, config, token, config.part.control_port, is_up=False) as link:
                await run_node(link, address, settings, lambda: announce(link.me), tell)
        finally:
            if own is not None:
                own.remove()

    return work


def _prefill(config: Config, token: str | None, part: PartId) -> Work:
    from moonpool.live.prefill import PrefillConfig, run_prefill

    address = _conductor(config)
    stages = config.batch.pipeline
    settings = PrefillConfig(
        served_model=config.served_name,
        node=_its_node(config),
        chunk_tokens=config.batch.prefill_chunk if stages == 1 else config.batch.pipeline_chunk,
        queue_bound=config.placement.queue_bound,
        token=token,
        stages=stages,
        cost=_costs(config)[0],
    )
    engine = _engine(config, config.pool.prefill_pages, (0, stages))

    async def work() -> None:
        while True:
            with _open(part, config, token, config.part.control_port) as link:
                try:
                    return await run_prefill(link, address, settings, engine)
                except StageLostError as e:
                    log.warning("%s", e)

    return work


def _stage(config: Config, token: str | None, part: PartId) -> Work:
    from moonpool.live.stage import StageConfig, run_stage

    address = _conductor(config)
    stage, stages = config.stage.stage, config.batch.pipeline
    if stage >= stages:
        raise ConfigError(f"--stage {stage}: a pipeline of --pipeline {stages} has stages 0 to {stages - 1}")
    settings = StageConfig(
        served_model=config.served_name,
        leader=PartId(config.stage.leader or "prefill-0"),
        stage=stage,
        stages=stages,
        node=_its_node(config),
        chunk_tokens=config.batch.pipeline_chunk,
        token=token,
        data_host=config.part.bind,
        data_port=config.part.data_port,
    )
    engine = _engine(config, config.pool.prefill_pages, (stage, stages))

    async def work() -> None:
        with _open(part, config, token, config.part.control_port) as link:
            await run_stage(link, address, settings, engine)

    return work


def _decode(config: Config, token: str | None, part: PartId) -> Work:
    from moonpool.live.decode import DecodeConfig, run_decode

    address = _conductor(config)
    settings = DecodeConfig(
        served_model=config.served_name,
        node=_its_node(config),
        max_batch=config.batch.max_batch,
        queue_bound=config.placement.queue_bound,
        cost=_costs(config)[1],
    )
    engine = _engine(config, config.pool.decode_pages)

    async def work() -> None:
        with _open(part, config, token, config.part.control_port) as link:
            await run_decode(link, address, settings, engine)

    return work


def _coupled(config: Config, token: str | None, part: PartId) -> Work:
    from moonpool.live.coupled import CoupledConfig, run_coupled

    address = _conductor(config)
    chunked = config.batch.coupled_mode == "chunked"
    engine = _engine(config, config.pool.decode_pages)
    settings = CoupledConfig(
        served_model=config.served_name,
        node=_its_node(config),
        mode=config.batch.coupled_mode,
        step_tokens=config.batch.prefill_chunk if chunked else engine.context_tokens,
        max_batch=config.batch.max_batch,
        queue_bound=config.placement.queue_bound,
    )

    async def work() -> None:
        with _open(part, config, token, config.part.control_port) as link:
            await run_coupled(link, address, settings, engine)

    return work


def _external(config: Config) -> External | None:
    from moonpool.command.instances import read_instances

    return None if config.external.instances is None else read_instances(Path(config.external.instances))


def _link(config: Config, token: str | None, part: PartId) -> Link:
    """To be closed by whoever asks for it."""
    from moonpool.wire.link import Link

    return Link(part, config.part.bind, 0, token)


def _rules(config: Config) -> ConductorConfig:
    from moonpool.core.cost import TransferCost
    from moonpool.core.settings import ConductorConfig

    prefill, decode = _costs(config)
    profile = _profile(config)
    transfer = TransferCost()
    if profile is not None:
        transfer = TransferCost(profile.link_latency, profile.link_bytes_per_second, profile.ssd_read_bytes_per_second)
    return ConductorConfig(
        prefill_cost=prefill,
        decode_cost=decode,
        transfer_cost=transfer,
        placement=config.placement.placement,
        threshold=config.placement.fetch_threshold,
        dear_first=config.placement.dear_first,
        admission=config.placement.admission,
        slo=Slo(config.placement.slo_ttft, config.placement.slo_tbt),
        classes=config.placement.classes,
        queue_bound=config.placement.queue_bound,
    )


def _profile(config: Config) -> Profile | None:
    from moonpool.command.hardware import hardware_of

    return hardware_of(config)


def _costs(config: Config) -> tuple[PrefillCoefficients, DecodeCoefficients]:
    """What is expected of the engine before anything is measured."""
    from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients

    profile = _profile(config)
    if profile is None:
        return PrefillCoefficients(), DecodeCoefficients()
    return profile.prefill, profile.decode


def _events(config: Config) -> StreamConfig | None:
    from moonpool.live.kv_events.stream import StreamConfig

    port, replay = config.events.kv_events_port, config.events.kv_events_replay_port
    if port is None:
        return None
    following = port + 1 if port else 0
    return StreamConfig(config.events.kv_events_host, port, following if replay is None else replay)


def _journal(config: Config) -> JournalConfig | None:
    from moonpool.command.journal import directory_of
    from moonpool.wire.recorder import JournalConfig

    directory = directory_of(config.journal.journal)
    return None if directory is None else JournalConfig(directory, config.journal.journal_bytes)


@contextmanager
def _open(
    part: PartId, config: Config, token: str | None, port: int, conducts: str = "", is_up: bool = True
) -> Iterator[Link]:
    """A part's link, closed at the end. The supervisor hears that the part is up, unless that is told it later."""
    from moonpool.live.process import announce
    from moonpool.wire.link import Link

    link = Link(part, config.part.bind, port, token)
    try:
        if is_up:
            announce(link.me, conducts)
        yield link
    finally:
        link.close()


def _conductor(config: Config) -> str:
    """The Conductor's address as links take it."""
    given = config.part.conductor
    if not given:
        raise ConfigError("--conductor is missing: the address HOST:PORT of the Conductor to join")
    host, colon, port = given.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--conductor {given}: must be HOST:PORT, such as 127.0.0.1:9000")
    return f"tcp://{host}:{port}"


def _its_node(config: Config) -> PartId | None:
    return PartId(config.part.node) if config.part.node else None


def _weights(config: Config) -> Path:
    from moonpool.engine.model import resolve

    return resolve(config.model.model)


def _engine(config: Config, pages: int, stage: tuple[int, int] = (0, 1)) -> StageEngine:
    """`stage`: number, of so many."""
    if config.model.engine == "timed":
        from moonpool.command.hardware import timed_config
        from moonpool.engine.timed import TimedEngine

        profile = _profile(config)
        return TimedEngine(
            page_count=pages,
            block_tokens=config.pool.block_size,
            config=None if profile is None else timed_config(profile),
            stage=stage,
        )
    from moonpool.engine.runner import TorchEngine

    return TorchEngine(
        _weights(config),
        block_tokens=config.pool.block_size,
        page_count=pages,
        dtype=config.model.dtype,
        quantize=config.model.quantize,
        threads=config.model.threads,
        stage=stage,
    )
