"""A live cluster's journal: it decides again to the byte elsewhere, and tells why requests went where they went."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
from pathlib import Path

import httpx
import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.wire import journal
from tests.live.kit import HANG, Stream, eventually, pid_of, random_prompt
from tests.replay.kit import moonpool_command

pytestmark = pytest.mark.live

SECRET = "the owl of the old mill sings at midnight"


def post(cluster: RunningCluster, name: str, prompt: list[int] | str, **headers: str) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return httpx.post(
        f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": name, **headers}, timeout=HANG
    )


def test_a_cluster_with_failures_is_recorded_explained_and_decided_again(smollm2: Path, tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    flags = ("--engine", "timed", "--nodes", "2", "--prefill", "2", "--decode", "2", "--journal", str(directory))
    with running_cluster(*flags) as cluster:
        assert post(cluster, "text", SECRET).status_code == 200
        prompt = random_prompt(300, seed=1)
        for name in ("first", "again"):
            assert post(cluster, name, prompt).status_code == 200
        refused = post(cluster, "too-late", random_prompt(400, seed=3), **{"x-slo-ttft-ms": "1"})
        assert refused.status_code == 429
        streams = [Stream(cluster, random_prompt(200, seed=10 + i), 60) for i in range(6)]
        assert all(stream.first.wait(HANG) for stream in streams)
        os.kill(pid_of(cluster, "decode-0"), signal.SIGKILL)
        for stream in streams:
            assert len(stream.result()) == 60
            assert stream.error is None
        eventually(lambda: cluster.describe()["decisions"]["parts_lost"] > 0, "the dead worker is missed")  # type: ignore[index]
        _check_cluster(cluster)
        live = moonpool_command("explain", "again", "--url", cluster.url)
        assert live.returncode == 0, live.stderr
        counters = cluster.describe()["counters"]["conductor"]  # type: ignore[index]
        assert counters["journal_dropped"] == 0
        until = time.monotonic() + HANG
        while not any(b"too-late" in file.read_bytes() for file in journal.segments_in(directory)):
            assert time.monotonic() < until
            time.sleep(0.05)
    _check_journal(directory, live.stdout)


def _check_cluster(cluster: RunningCluster) -> None:
    recent = cluster.describe()["recent"]
    fates = {brief["label"]: brief for brief in recent}  # type: ignore[attr-defined]
    assert fates["again"]["outcome"] == "finished"
    assert "blocks hit" in fates["again"]["why"]
    assert fates["too-late"]["outcome"] == "refused"
    assert fates["too-late"]["why"].startswith("ttft-slo: the first token is predicted after")
    (story,) = json.loads(cluster.get("/cluster/requests/too-late"))
    (weighing,) = story["weighings"]
    assert weighing["verdict"] == "refused"
    assert {candidate["id"] for candidate in weighing["prefill"]} == {"prefill-0", "prefill-1"}
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        cluster.get("/cluster/requests/nobody")
    assert json.loads(missing.value.read())["error"]["code"] == "request_not_found"
    missing.value.close()
    lost = moonpool_command("explain", "nobody", "--url", cluster.url)
    assert lost.returncode == 2
    assert "nothing is known of 'nobody': the cluster at" in lost.stderr


def _check_journal(directory: Path, live: str) -> None:
    """The cluster is gone."""
    done = moonpool_command("journal", "replay", str(directory), hash_seed="99")
    assert done.returncode == 0, done.stdout + done.stderr
    segments = [journal.read_segment(file) for file in journal.segments_in(directory)]
    assert sum(len(segment.entries) for segment in segments) > 100
    kinds = {type(action).__name__ for s in segments for entry in s.entries for action in entry.actions}
    assert kinds >= {"Place", "Reject", "Resubmit", "ReserveRoom", "FleetChanged", "ExpectEnd"}
    kept = moonpool_command("explain", "again", "--journal", str(directory), hash_seed="7")
    assert kept.returncode == 0, kept.stderr
    assert kept.stdout.split("\n\n")[1:] == live.split("\n\n")[1:]
    for line in ("arrived: 300 tokens", "weighed by ", "placed on prefill-", "prefill done on", "finished on decode-"):
        assert line in kept.stdout
    data = b"".join(file.read_bytes() for file in journal.segments_in(directory))
    for text in (SECRET, "the owl", "midnight"):
        assert text.encode() not in data
