"""The dashboard's files, and the snapshots that all who look share. How it looks is tested in tests/browser."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.vocabulary import Slo
from moonpool.gateway import live, outcomes
from moonpool.gateway.dashboard import FILES
from moonpool.gateway.generation import Completed, Generation, Job
from moonpool.gateway.live import Sample
from moonpool.gateway.outcomes import Outcomes
from moonpool.wire.messages import Describe, Sampling
from tests.gateway.conftest import Open
from tests.gateway.kit import END, Stage, run, until
from tests.keys import bearer, make_key, revoke


async def look(s: Stage, after: int = 0) -> dict[str, Any]:
    answer = await s.client.get(f"{s.url}/cluster/live?after={after}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def asked(s: Stage) -> int:
    """How often the Conductor was asked for what the dashboard shows."""
    return sum(question.live for question in s.got("conductor", Describe))


def test_the_page_is_whole_and_needs_no_other_host(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            files = {}
            for path in FILES:
                answer = await s.client.get(f"{s.url}/dashboard{path}")
                assert answer.status_code == 200
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                again = await s.client.get(
                    f"{s.url}/dashboard{path}", headers={"if-none-match": answer.headers["etag"]}
                )
                assert (again.status_code, again.content) == (304, b"")
                files[path] = answer.text
            page = files[""]
            for reference in re.findall(r'(?:href|src)="([^"#]+)"', page):
                assert reference.removeprefix("dashboard") in files
            for path, text in files.items():
                for module in re.findall(r'from "\./([^"]+)"', text):
                    assert f"/{module}" in files, f"{path} imports it"
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page), "nothing inline"
            markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc"
            for path, text in files.items():
                assert path == "/uplot.js" or not re.search(markup, text), f"{path}: text must not become markup"

    run(test())


def test_what_others_wrote_is_as_they_published_it() -> None:
    """A change of it is a new release of theirs (decision 0024)."""
    folder = resources.files("moonpool.gateway") / "page" / "uplot"
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in folder.iterdir()}
    assert found == {
        "LICENSE": "8f989229699b4fe2",
        "uPlot.iife.min.js": "19c8d4c6ad88929a",
        "uPlot.min.css": "df630c6a8d6f8eea",
    }


def test_ten_who_look_share_one_snapshot_and_none_is_made_for_nobody(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FRESH_SECONDS", 60.0)

    async def test() -> None:
        async with opened() as s:
            await s.client.get(s.url + "/dashboard")
            assert asked(s) == 0
            seen = await asyncio.gather(*(look(s) for _ in range(10)))
            assert asked(s) == 1
            assert {found["now"]["number"] for found in seen} == {1}
            monkeypatch.setattr(live, "FRESH_SECONDS", 0.0)
            found = await look(s, after=1)
            assert asked(s) == 2
            assert [sample[0] for sample in found["samples"]] == [2]
            assert len(found["samples"][0]) == len(Sample.__struct_fields__)
            elsewhere = await look(s, after=9000)
            assert [sample[0] for sample in elsewhere["samples"]] == [1, 2, 3], "numbers of a gateway that was before"

    run(test())


def test_it_shows_parts_and_what_they_count(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            now = (await look(s))["now"]
            decode, node = now["parts"]
            assert (decode["running"], decode["pages_free"]) == (1, 6)
            assert node["counters"] == {"bytes_in": 100.0}
            assert now["decisions"]["placed"] == 3
            assert [c["name"] for c in now["classes"]] == ["high", "batch"]

    run(test())


def test_requests_count_as_good_within_their_own_limits(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [5, 6, 7, END]) as s:
            await s.complete([9] * 10, max_tokens=9)
            hasty = {"x_slo_ttft_ms": "0.000001"}
            await s.post("/v1/completions", {"model": "smollm2", "prompt": [9] * 10, "max_tokens": 9}, **hasty)
            hasty = {"x_slo_tpot_ms": "0.000001"}
            await s.post("/v1/completions", {"model": "smollm2", "prompt": [9] * 10, "max_tokens": 9}, **hasty)
            found = await look(s)
            gateway = found["now"]["gateway"]
            window = gateway["window"]
            assert (window["completed"], window["attained"], window["ttft"]["count"]) == (3, 1, 3)
            assert 0 < window["ttft"]["p50"] <= window["ttft"]["p90"] <= window["ttft"]["p99"]
            assert 0 < window["tbt"]["p50"] <= window["tbt"]["p99"]
            assert (gateway["totals"]["prompt_tokens"], gateway["totals"]["tokens"]) == (30, 12)
            assert gateway["answers"]["200"] == 3
            assert gateway["longest_first"] == gateway["longest_next"] == 0.0

    run(test())


def test_without_a_conductor_the_gateway_still_tells_of_itself(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            s.describes = False
            found = await look(s)
            assert "the Conductor gave no answer" in found["now"]["problem"]
            assert found["now"]["gateway"]["running"] == 0
            assert dict(zip(Sample.__struct_fields__, found["samples"][0], strict=True))["held"] is None

    run(test())


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "٣", "9" * 13])
def test_what_is_no_number_of_a_sample_is_named(opened: Open, after: str) -> None:
    async def test() -> None:
        async with opened() as s:
            answer = await s.client.get(s.url + "/cluster/live", params={"after": after})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")

    run(test())


def test_where_keys_are_asked_for_only_the_empty_page_is_for_everybody(opened: Open, tmp_path: Path) -> None:
    key = bearer(make_key(tmp_path / "keys.json", admin=True))

    async def test() -> None:
        async with opened(keys=str(tmp_path / "keys.json")) as s:
            for path in FILES:
                assert (await s.client.get(f"{s.url}/dashboard{path}")).status_code == 200
            assert (await s.client.get(s.url + "/dashboards")).status_code == 401
            assert (await s.client.get(s.url + "/cluster/live")).status_code == 401
            assert (await s.client.get(s.url + "/cluster/live", headers=key)).status_code == 200

    run(test())


def test_a_hundred_who_look_and_come_back_cost_one_snapshot(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FRESH_SECONDS", 60.0)

    async def test() -> None:
        async with opened() as s:
            for waves in (1, 2):
                seen = await asyncio.gather(*(look(s) for _ in range(100)))
                assert len({found["now"]["number"] for found in seen}) == 1
                assert asked(s) == waves
                monkeypatch.setattr(live, "FRESH_SECONDS", 0.0)
                await look(s)  # what the first hundred saw is old
                monkeypatch.setattr(live, "FRESH_SECONDS", 60.0)

    run(test())


def test_who_looks_with_a_key_that_is_revoked_sees_no_more(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    mine, theirs = make_key(path, admin=True), make_key(path, admin=True)

    async def test() -> None:
        async with opened(keys=str(path)) as s:

            async def status(key: str) -> int:
                return (await s.client.get(s.url + "/cluster/live", headers=bearer(key))).status_code

            s.describes = False  # a snapshot is under way while the key goes
            waiting = asyncio.create_task(status(mine))
            await until(lambda: asked(s) == 1)
            await asyncio.to_thread(revoke, path, mine)
            began = time.monotonic()
            while await status(mine) != 401:
                assert time.monotonic() < began + 5
            assert await waiting in (200, 401)
            s.describes = True
            assert [await status(key) for key in (mine, theirs)] == [401, 200]

    run(test())


def generation(ttft: float, gaps: Sequence[float], slo: Slo, priority: str) -> Generation:
    """One that has ended well, at time 100."""
    job = Job("", (1,), (), Sampling(seed=0, max_tokens=9), "", slo, priority, arrived=100.0 - ttft, deadline=200.0)
    made = Generation("r", job, lambda: None, priority=priority, ending=Completed("stop"))  # type: ignore[arg-type]
    made.first_token_at = 100.0
    made.output = [1] * (1 + len(gaps))
    made.gaps.extend(gaps)
    return made


def test_limits_are_the_requests_own_before_its_classs_and_batch_work_has_none() -> None:
    memory = Outcomes()
    ended = [
        generation(1.0, [0.1] * 9 + [0.5], Slo(), "high"),  # the slowest tenth is beyond the class's limit
        generation(1.0, [0.1] * 9 + [0.5], Slo(tbt=0.6), "high"),
        generation(3.0, [], Slo(), "high"),
        generation(3.0, [], Slo(ttft=1.0), "batch"),
        generation(3.0, [], Slo(), "of an earlier Conductor"),
    ]
    for each in ended:
        memory.began(each)
        memory.ended(each, 101.0)
    limits = {"high": Slo(2.0, 0.4), "batch": Slo()}
    window = memory.window(60.0, 110.0, limits)
    assert (window.completed, window.attained) == (5, 3)
    assert memory.window(60.0, 110.0, limits, "high").attained == 1
    assert (window.ttft.p50, window.ttft.p90, window.tbt.count, window.tbt.p50) == (3.0, 3.0, 2, 0.5)
    assert memory.window(5.0, 110.0, limits).completed == 0


def test_the_memory_of_outcomes_is_bounded_and_says_how_far_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "KEPT", 4)
    memory = Outcomes()
    for second in range(10):
        memory.ended(generation(1.0, [], Slo(), ""), 100.0 + second)
    window = memory.window(60.0, 110.0, {})
    assert (window.completed, window.seconds) == (4, 4.0)
