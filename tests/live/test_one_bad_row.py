"""A request whose tokens cannot be drawn ends alone: those that share its steps lose no attempt."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moonpool.engine.timed import reference_tokens
from tests.conftest import StartCluster
from tests.live.kit import HANG, audit, complete, output_ids, random_prompt

pytestmark = pytest.mark.live

AT_PREFILL, AT_DECODE = 666, 667
"""Seeds for which the faulty engine below draws no first token, or no fifth."""
FAULT = f"""
from moonpool.engine.timed import TimedEngine

draw = TimedEngine._draw

def faulty(self, row, sampling):
    position = row.start + row.count - row.prompt_tokens
    if (sampling.seed, position) in (({AT_PREFILL}, 0), ({AT_DECODE}, 4)):
        raise RuntimeError("no luck")
    return draw(self, row, sampling)

TimedEngine._draw = faulty
"""
"""Python runs a `sitecustomize` on its path at the start of each process."""


@pytest.mark.parametrize(("seed", "worker"), [(AT_PREFILL, "prefill-0"), (AT_DECODE, "decode-0")])
def test_a_request_without_tokens_ends_alone(
    start_cluster: StartCluster, tmp_path: Path, seed: int, worker: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    cluster = start_cluster(engine="timed", env={"PYTHONPATH": path})
    prompts = [random_prompt(40, seed=n) for n in range(8)]

    def bad() -> tuple[int, str]:
        body = {"model": "smollm2", "prompt": random_prompt(40, seed=99), "max_tokens": 8, "seed": seed}
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG)
        return response.status_code, response.text

    with ThreadPoolExecutor(9) as pool:
        failing = pool.submit(bad)
        answers = list(pool.map(lambda p: complete(cluster, p, 60, ignore_eos=True), prompts))
        status, text = failing.result()
    assert [output_ids(a) for a in answers] == [reference_tokens(p, 60) for p in prompts]
    assert status == 503, text
    assert "no luck" in text
    audit(cluster)
    ended = [line for line in cluster.log().splitlines() if "gave up" in line or "refused:" in line]
    assert len({line.split(" request ")[1].split(":")[0] for line in ended}) == 1, "another request was thrown out"
    assert worker in ended[0]
