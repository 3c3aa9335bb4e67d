"""Cached contexts in real clusters: they stay while others come and go, and survive the death of every part."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool.bench.cluster import RunningCluster, free_port, running_cluster
from moonpool.engine.timed import reference_tokens
from tests.docs.pages import file_of
from tests.keys import bearer, make_key
from tests.live.kit import (
    BLOCK,
    HANG,
    audit,
    cached_tokens,
    complete,
    counters,
    eventually,
    node_client,
    output_ids,
    pid_of,
    random_prompt,
)
from tests.live.parts import Parts, separate_parts

pytestmark = pytest.mark.live

OUTPUT = 4
DRAM = 64
"""Blocks: one of the timed engine has 32 KiB. A quarter of them may be pinned."""
SMALL = ("--engine", "timed", "--dram-per-node", "2MiB", "--admission", "none")
OFF = ("--caching-dir", "off")
PREFIX = random_prompt(6 * BLOCK + 10, seed=1)
PINNED = 6 * BLOCK
TAIL = random_prompt(20, seed=2)


def cache(cluster: RunningCluster, prompt: list[int] = PREFIX, **fields: object) -> dict[str, Any]:
    answer = httpx.post(f"{cluster.url}/v1/caching", json={"prompt": prompt, **fields}, timeout=HANG)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def refusal(cluster: RunningCluster, prompt: list[int]) -> tuple[int, str]:
    answer = httpx.post(f"{cluster.url}/v1/caching", json={"prompt": prompt}, timeout=HANG)
    return answer.status_code, answer.json()["error"]["code"]


def look(cluster: RunningCluster, id_: str) -> dict[str, Any]:
    answer = httpx.get(f"{cluster.url}/v1/caching/{id_}", timeout=HANG)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def is_ready(cluster: RunningCluster, id_: str) -> bool:
    try:
        return bool(look(cluster, id_)["status"] == "ready")
    except httpx.HTTPError:
        return False


def delete(cluster: RunningCluster, id_: str) -> None:
    httpx.delete(f"{cluster.url}/v1/caching/{id_}", timeout=HANG).raise_for_status()


def by_id(cluster: RunningCluster, id_: str, tail: list[int] = TAIL) -> dict[str, Any]:
    """The tail after the context."""
    body = {"prompt": tail, "max_tokens": OUTPUT, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-moonpool-cache": id_}, timeout=HANG)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_used(cluster: RunningCluster, id_: str) -> None:
    """By its id and by itself it is hit, with the right answer."""
    wanted = reference_tokens([*PREFIX, *TAIL], OUTPUT)
    for answer in (by_id(cluster, id_), complete(cluster, [*PREFIX, *TAIL], OUTPUT)):
        assert output_ids(answer) == wanted
        assert cached_tokens(answer) >= PINNED


def flush(cluster: RunningCluster, blocks: int = 3 * DRAM) -> None:
    """Other prompts, of three times as many blocks as there are."""
    prompts = [random_prompt(8 * BLOCK, seed=1000 + n) for n in range(blocks // 8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: complete(cluster, prompt, 1), prompts))


def kill(cluster: RunningCluster, part: str) -> None:
    os.kill(pid_of(cluster, part), signal.SIGKILL)


def at_node(cluster: RunningCluster, name: str) -> float:
    """A counter of the only node, as it says itself: what `/cluster` shows is a second old."""
    with node_client(cluster, "node-0") as client:
        return client.stats().result(HANG)[name]


def pinned(cluster: RunningCluster) -> float:
    return at_node(cluster, "pins")


def gateway_counts(cluster: RunningCluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.describe()["gateway"]  # type: ignore[assignment]
    return found


# ---- while all goes well


def test_a_context_stays_while_others_come_and_go(smollm2: Path) -> None:
    with running_cluster(*SMALL, *OFF) as cluster:
        made = cache(cluster, name="mine", ttl=600, metadata={"a": "b"})
        assert (made["tokens"], made["pinned_tokens"], made["bytes"]) == (len(PREFIX), PINNED, 6 * (32 << 10))
        assert (made["status"], made["name"], made["metadata"]) == ("ready", "mine", {"a": "b"})
        assert 590 <= made["expired_at"] - time.time() <= 601
        assert look(cluster, made["id"]) == made
        listed = httpx.get(f"{cluster.url}/v1/caching", timeout=HANG).json()
        assert listed == {"object": "list", "data": [made], "has_more": False}
        unpinned = random_prompt(6 * BLOCK, seed=7)
        complete(cluster, unpinned, 1)
        flush(cluster)
        check_used(cluster, made["id"])
        assert cached_tokens(complete(cluster, [*unpinned, 5], 1)) == 0, "nothing was evicted: the test shows nothing"
        eventually(lambda: pinned(cluster) == 6, "its blocks are pinned")
        page = cluster.get("/metrics").decode()
        assert re.search(r"moonpool:cached_contexts\{.*\} 1\.0", page)
        assert re.search(r"moonpool:cached_context_tokens\{.*\} 384\.0", page)
        delete(cluster, made["id"])
        eventually(lambda: pinned(cluster) == 0, "nothing is pinned")
        flush(cluster)
        assert cached_tokens(complete(cluster, [*PREFIX, 5], 1)) == 0
        audit(cluster)


def test_contexts_that_share_a_beginning_let_go_of_their_own_only(smollm2: Path) -> None:
    with running_cluster(*SMALL, *OFF) as cluster:
        long, short = cache(cluster), cache(cluster, PREFIX[: 3 * BLOCK])
        again = cache(cluster)
        assert again["id"] != long["id"]
        eventually(lambda: pinned(cluster) == 6, "shared blocks are pinned once")
        delete(cluster, long["id"])
        delete(cluster, again["id"])
        eventually(lambda: pinned(cluster) == 3, "the short one keeps what it needs")
        delete(cluster, short["id"])
        eventually(lambda: pinned(cluster) == 0, "nothing is pinned")


def test_a_context_ends_with_its_time(smollm2: Path) -> None:
    with running_cluster(*SMALL, *OFF) as cluster:
        made, other = cache(cluster, ttl=2), cache(cluster, random_prompt(2 * BLOCK, seed=9), ttl=600)
        id_, ref = made["id"], {"x-moonpool-cache": f"{other['id']};reset_ttl=2"}
        httpx.post(f"{cluster.url}/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers=ref, timeout=HANG)
        eventually(lambda: gateway_counts(cluster)["contexts_expired"] == 2, "one ends earlier than it was to")
        assert pinned(cluster) == 0
        for answer in (
            httpx.get(f"{cluster.url}/v1/caching/{id_}", timeout=HANG),
            httpx.delete(f"{cluster.url}/v1/caching/{id_}", timeout=HANG),
            httpx.post(f"{cluster.url}/v1/completions", json={"prompt": [5]}, headers={"x-moonpool-cache": id_}),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "context_expired")
        assert httpx.get(f"{cluster.url}/v1/caching", timeout=HANG).json()["data"] == []


def test_the_examples_of_the_docs(smollm2: Path, tmp_path: Path) -> None:
    example = file_of("docs/caching.md", "caching.py")
    with running_cluster("--engine", "timed", "--dram-per-node", "16MiB", *OFF) as cluster:
        script = tmp_path / "caching.py"
        checks = "\nassert by_id['choices'] == in_full['choices']\nassert longer['expired_at'] > made['expired_at']\n"
        checks += (
            "assert [c['id'] for c in listed] == [made['id']]\nassert api.get('/v1/caching').json()['data'] == []\n"
        )
        script.write_text(example.replace("http://127.0.0.1:8000", cluster.url) + checks)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stderr
        id_, tokens, pinned = done.stdout.split()[:3]
        assert id_.startswith("cache-")
        assert int(tokens) >= int(pinned) >= 2 * BLOCK
        # Its default system prompt and all: what is cached is what a chat begins with.
        assert [int(n) for n in re.findall(r"'cached_tokens': (\d+)", done.stdout)] >= [int(pinned)] * 2


# ---- limits


def test_the_quota_and_the_share_are_kept(smollm2: Path) -> None:
    quota = ("--caching-quota", str(40 * BLOCK))
    with running_cluster(*SMALL, *OFF, *quota) as cluster:
        prompts = [random_prompt(8 * BLOCK, seed=50 + n) for n in range(3)]
        first, second = cache(cluster, prompts[0]), cache(cluster, prompts[1])
        assert refusal(cluster, random_prompt(25 * BLOCK, seed=63)) == (429, "caching_quota_exceeded")
        assert refusal(cluster, random_prompt(2 * BLOCK, seed=60)) == (429, "caching_full")
        assert refusal(cluster, random_prompt(17 * BLOCK, seed=61)) == (400, "context_too_large")
        assert at_node(cluster, "pinned_bytes") == at_node(cluster, "pinnable_bytes") == DRAM * (32 << 10) / 4
        # Others have the rest of it: a prompt of more blocks than are left is none the less served.
        long = random_prompt(24 * BLOCK, seed=62)
        assert output_ids(complete(cluster, long, OUTPUT)) == reference_tokens(long, OUTPUT)
        flush(cluster)
        delete(cluster, first["id"])
        cache(cluster, prompts[2])
        assert cached_tokens(complete(cluster, [*prompts[1], 5], 1)) == 8 * BLOCK
        delete(cluster, second["id"])
        audit(cluster)


def test_a_prompt_that_does_not_fit_beside_what_is_pinned_is_refused_at_once(smollm2: Path) -> None:
    """Of the 32 blocks that there are a context has 8, and the prompt takes 27; it is served when the pins are gone."""
    with running_cluster(*SMALL, *OFF, "--dram-per-node", "1MiB") as cluster:
        context, long = random_prompt(8 * BLOCK, seed=64), random_prompt(27 * BLOCK, seed=65)
        made = cache(cluster, context)
        began = time.monotonic()
        answer = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": long, "max_tokens": 1}, timeout=HANG)
        assert time.monotonic() - began < 60, "it was held"
        assert (answer.status_code, answer.headers["x-moonpool-reason"]) == (429, "kv-room"), answer.text
        assert "delete cached contexts, or give nodes more DRAM" in answer.json()["error"]["message"]
        with_it = [*context, *long[: 19 * BLOCK]]
        assert output_ids(complete(cluster, with_it, OUTPUT)) == reference_tokens(with_it, OUTPUT), "as many blocks"
        delete(cluster, made["id"])
        assert output_ids(complete(cluster, long, OUTPUT)) == reference_tokens(long, OUTPUT)
        audit(cluster)


def test_a_client_that_leaves_while_its_context_is_made_leaves_nothing(smollm2: Path) -> None:
    prompts = [random_prompt(8 * BLOCK, seed=70 + n) for n in range(12)]
    with running_cluster(*SMALL, *OFF) as cluster:
        left = 0
        for n, prompt in enumerate(prompts):
            try:
                httpx.post(f"{cluster.url}/v1/caching", json={"prompt": prompt}, timeout=0.01 + 0.01 * n)
            except httpx.TimeoutException:
                left += 1
            for made in httpx.get(f"{cluster.url}/v1/caching", timeout=HANG).json()["data"]:
                delete(cluster, made["id"])
        assert left > 0
        eventually(lambda: gateway_counts(cluster)["seats_taken"] == 0, "no seat is taken")
        eventually(lambda: pinned(cluster) == 0, "nothing is pinned")
        audit(cluster)
        assert gateway_counts(cluster)["cached_contexts"] == 0


def test_a_context_is_its_keys_alone(smollm2: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine, yours = bearer(make_key(keys)), bearer(make_key(keys))
    with running_cluster(*SMALL, *OFF, "--keys", str(keys)) as cluster:

        def post(path: str, body: dict[str, object], headers: dict[str, str]) -> httpx.Response:
            return httpx.post(cluster.url + path, json=body, headers=headers, timeout=HANG)

        made = post("/v1/caching", {"prompt": PREFIX}, mine).json()
        assert (made["status"], made["pinned_tokens"]) == ("ready", PINNED)
        rest: dict[str, object] = {"prompt": TAIL, "max_tokens": OUTPUT, "temperature": 0, "return_token_ids": True}
        whole = rest | {"prompt": [*PREFIX, *TAIL]}
        by_name = post("/v1/completions", rest, mine | {"x-moonpool-cache": made["id"]}).json()
        in_full = post("/v1/completions", whole, mine).json()
        foreign = post("/v1/completions", whole, yours).json()
        wanted = reference_tokens([*PREFIX, *TAIL], OUTPUT)
        assert [output_ids(answer) for answer in (by_name, in_full, foreign)] == [wanted] * 3
        assert cached_tokens(by_name) >= PINNED
        assert cached_tokens(in_full) >= PINNED
        assert cached_tokens(foreign) == 0
        assert post("/v1/completions", rest, yours | {"x-moonpool-cache": made["id"]}).status_code == 404


# ---- when parts die


@pytest.fixture(params=["dram", "ssd"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    return () if request.param == "dram" else ("--ssd-per-node", "16MiB", "--ssd-dir", str(tmp_path / "ssd"))


def test_a_context_survives_its_node(smollm2: Path, tier: tuple[str, ...]) -> None:
    with running_cluster(*SMALL, *OFF, *tier) as cluster:
        id_ = cache(cluster)["id"]
        if tier:
            eventually(lambda: at_node(cluster, "ssd_blocks") == 6, "its blocks are on the SSD")
        kill(cluster, "node-0")
        eventually(lambda: not is_ready(cluster, id_), "it is missed")
        eventually(lambda: is_ready(cluster, id_), "it is pinned again")
        eventually(lambda: pinned(cluster) == 6, "its blocks are pinned again")
        cluster.wait_ready()
        again = gateway_counts(cluster)["contexts_computed_again"]
        assert again == (0 if tier else 1)
        assert at_node(cluster, "ssd_promotions") == (6 if tier else 0)
        flush(cluster)
        check_used(cluster, id_)
        audit(cluster)


def test_a_context_survives_workers_and_the_gateway(smollm2: Path, tmp_path: Path) -> None:
    """The gateway's process is the Conductor's too."""
    with running_cluster(*SMALL, "--caching-dir", str(tmp_path)) as cluster:
        made = cache(cluster, name="mine")
        kill(cluster, "decode-0")
        kill(cluster, "prefill-0")
        assert look(cluster, made["id"]) == made
        kill(cluster, "gateway-0")
        eventually(lambda: is_ready(cluster, made["id"]), "the next gateway knows it")
        assert look(cluster, made["id"]) == made
        cluster.wait_ready()
        assert gateway_counts(cluster)["contexts_computed_again"] == 0, "its pins were there all the time"
        flush(cluster)
        check_used(cluster, made["id"])
        delete(cluster, made["id"])
        eventually(lambda: pinned(cluster) == 0, "nothing is pinned")
        kill(cluster, "gateway-0")
        eventually(lambda: gone(cluster, made["id"]), "the next gateway does not know it")


@pytest.mark.parametrize("part", ["prefill-0", "decode-0", "node-0", "gateway-0"])
def test_a_part_that_dies_while_contexts_are_made_leaves_no_pins_of_its_time(
    smollm2: Path, tmp_path: Path, part: str
) -> None:
    """Each is made, or refused with the reason; what was made is there, and all that is pinned is of what was made."""
    prompts = [random_prompt(3 * BLOCK, seed=80 + n) for n in range(5)]
    with running_cluster(*SMALL, "--caching-dir", str(tmp_path)) as cluster, ThreadPoolExecutor(5) as pool:

        def make(prompt: list[int]) -> httpx.Response | None:
            try:
                return httpx.post(f"{cluster.url}/v1/caching", json={"prompt": prompt}, timeout=HANG)
            except httpx.TransportError:
                return None  # its gateway died

        making = [pool.submit(make, prompt) for prompt in prompts]
        time.sleep(0.7)
        kill(cluster, part)
        answers = [answer for each in making if (answer := each.result(HANG)) is not None]
        assert part == "gateway-0" or len(answers) == len(prompts)
        for answer in answers:
            assert answer.status_code in (200, 503), answer.text
            assert answer.status_code == 200 or answer.json()["error"]["code"]
        eventually(lambda: reaches(cluster), "the gateway is there")
        cluster.wait_ready()
        listed = httpx.get(f"{cluster.url}/v1/caching", timeout=HANG).json()["data"]
        made = {answer.json()["id"] for answer in answers if answer.status_code == 200}
        assert made <= {context["id"] for context in listed}
        eventually(lambda: all(is_ready(cluster, context["id"]) for context in listed), "all are pinned again")
        for context in listed:
            delete(cluster, context["id"])
        if part != "gateway-0":  # what that had pinned for a context that nobody has ends by itself, 90 s later
            eventually(lambda: pinned(cluster) == 0, "nothing stays pinned")
        audit(cluster)


def reaches(cluster: RunningCluster) -> bool:
    try:
        return httpx.get(f"{cluster.url}/health", timeout=HANG).status_code == 200
    except httpx.HTTPError:
        return False


def gone(cluster: RunningCluster, id_: str) -> bool:
    try:
        return httpx.get(f"{cluster.url}/v1/caching/{id_}", timeout=HANG).status_code == 404
    except httpx.HTTPError:
        return False


def test_a_context_survives_the_whole_cluster(smollm2: Path, tmp_path: Path) -> None:
    options = (*SMALL, "--caching-dir", str(tmp_path))
    with running_cluster(*options) as cluster:
        made = cache(cluster, ttl=3000)
    with running_cluster(*options) as cluster:
        eventually(lambda: is_ready(cluster, made["id"]), "it is computed again")
        assert look(cluster, made["id"]) == made
        assert gateway_counts(cluster)["contexts_computed_again"] == 1
        flush(cluster)
        check_used(cluster, made["id"])


@pytest.fixture
def parts(smollm2: Path, tmp_path: Path) -> Iterator[Parts]:
    directory = str(tmp_path / "caching")
    config = {"engine": "timed", "dram-per-node": "2MiB", "admission": "none", "caching-dir": directory}
    with separate_parts(config) as cluster:
        for part in ("node-0", "node-1"):
            cluster.start_node(part)
        cluster.start_worker("prefill", "prefill-0", "node-0")
        cluster.start_worker("decode", "decode-0", "node-0")
        cluster.start_worker("decode", "decode-1", "node-1")
        cluster.wait_ready()
        eventually(lambda: len(counters(cluster)) >= 7, "all parts are in the cluster")
        yield cluster


def pins(cluster: Parts) -> dict[str, float]:
    """By node; none while there is no Conductor to ask."""
    try:
        counted = counters(cluster)
    except OSError:
        return {}
    return {part: values["pins"] for part, values in counted.items() if part.startswith("node")}


def test_a_context_survives_the_conductor_and_a_node_that_stays_away(parts: Parts) -> None:
    made = cache(parts)
    eventually(lambda: sorted(pins(parts).values()) == [0, 6], "one copy is pinned")
    home = max(pins(parts), key=pins(parts).__getitem__)
    parts.kill("conductor")
    assert look(parts, made["id"]) == made
    parts.start_conductor()
    parts.wait_ready()
    eventually(lambda: sum(pins(parts).values()) == 6, "the nodes are there again, with their pins")
    eventually(lambda: is_ready(parts, made["id"]), "the gateway sees that")
    assert look(parts, made["id"]) == made
    assert gateway_counts(parts)["contexts_computed_again"] == 0

    other = "node-1" if home == "node-0" else "node-0"
    for part in [home] + [w for w in parts.running if w.startswith(("prefill", "decode"))]:
        parts.kill(part)
        parts.report_lost(part)
    eventually(lambda: not is_ready(parts, made["id"]), "it is missed")
    parts.start_worker("prefill", "prefill-0", other)
    parts.start_worker("decode", "decode-0", other)
    eventually(lambda: is_ready(parts, made["id"]), "it is pinned elsewhere")
    eventually(lambda: pins(parts) == {other: 6}, "at the node that is left")
    check_used(parts, made["id"])


def test_two_gateways_do_not_share_a_directory(smollm2: Path, tmp_path: Path) -> None:
    config = {"engine": "timed", "dram-per-node": "2MiB", "caching-dir": str(tmp_path / "caching")}
    with separate_parts(config) as cluster:
        cluster.start_node("node-0")
        cluster.start_worker("coupled", "coupled-0", "node-0")
        cluster.wait_ready()
        made = cache(cluster)
        second = cluster.start("gateway", "gateway-1", "--conductor", cluster._address, "--port", str(free_port()))
        assert second.wait(HANG) == 2
        assert "another gateway keeps its cached contexts" in cluster.log()
        cluster.running.pop("gateway-1")
        assert look(cluster, made["id"]) == made
