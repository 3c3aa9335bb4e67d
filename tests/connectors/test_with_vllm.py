"""Two real vLLM servers on one node, beside one that is alone: `make test-vllm`.

Each server is a process of vLLM's own environment (bench/vllm_cpu.py), driven without HTTP; what was hit is counted by
vLLM itself. They compute in float32, so what is loaded is what would have been computed, and log-probabilities differ
only by what a batch of another shape does to sums.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench import vllm_cpu
from moonpool.bench.peer import Peer
from moonpool.bench.process import Worker, worker
from moonpool.core.blocks import hit_limit
from moonpool.core.vocabulary import KeySpace, KeySpaceId, NodePeer
from moonpool.store.client import NodeClient

from ..soak import SOAK
from ..store.kit import SECONDS, Conductor, eventually, keys_of

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("MOONPOOL_VLLM"), reason="vLLM's start takes a minute: make test-vllm"),
]

SIZE = 128
"""vLLM's blocks on CPU."""
TOLERANCE = 1e-3
"""Of a log-probability; those of a corrupted block are off by more than DIFFERENCE."""
DIFFERENCE = 0.05
START_SECONDS = 400.0
DRAM_BYTES = 1 << 30
BORDERS = (1, 127, 128, 129, 255, 256, 257, 600)
NODE = "dead-0"
"""It is killed in between."""

Prompt = list[int]


class Fleet:
    def __init__(self, conductor: Conductor, stack: contextlib.ExitStack) -> None:
        self._conductor = conductor
        self._stack = stack
        self.start_node()

    def start_node(self) -> None:
        self.node: NodePeer
        self.node, self.process = self._stack.enter_context(self._conductor.process_node(NODE, dram_bytes=DRAM_BYTES))

    def join(self) -> NodeClient:
        return NodeClient.connect(self.node.socket_path, name="test", incarnation="0")

    def start_servers(self, model: Path, peer: Peer, folder: Path) -> None:
        """Two that share and one that does not, all at once."""
        package = folder / "package"
        package.mkdir()
        for name in vllm_cpu.CONNECTOR_NEEDS:
            (package / name).symlink_to(vllm_cpu.connector_needs(peer) / name)
        self._where = model, peer, folder
        with ThreadPoolExecutor() as threads:
            self.alone, self.one, self.other = threads.map(self.start, ("alone", "one", "other"))
        self.living = [self.alone, self.one, self.other]

    def start(self, name: str, ranks: int = 1) -> Worker:
        model, peer, folder = self._where
        options: dict[str, Any] = {"tensor_parallel_size": ranks}
        if name != "alone":
            options["kv_transfer_config"] = transfer(self.node)
        environment = {
            **vllm_cpu.environment(peer, 1),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        if name == "other":
            # One has its engine in a process of its own, as servers do.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        arguments = [str(model), json.dumps(options)]
        side = "moonpool.bench.connected_vllm"
        return self._stack.enter_context(
            worker(name, folder, side, arguments, str(peer.python), environment, START_SECONDS)
        )


def transfer(node: NodePeer) -> dict[str, Any]:
    """`--kv-transfer-config`, patient: the machine may do something else as well."""
    deadlines = {"lookup_seconds": 2.0, "load_seconds": 10.0, "save_seconds": 10.0}
    return {
        "kv_connector": "MoonpoolConnector",
        "kv_connector_module_path": "moonpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": node.socket_path, **deadlines},
    }


@pytest.fixture(scope="module")
def fleet(smollm2: Path, vllm: Peer) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        conductor = Conductor(run_dir)
        stack.callback(conductor.close)
        fleet = Fleet(conductor, stack)
        fleet.start_servers(smollm2, vllm, folder)
        yield fleet


@pytest.fixture(autouse=True)
def nothing_is_left(fleet: Fleet) -> Iterator[None]:
    """Nothing of the pool is held after a test, and all servers but the one that it has killed answer."""
    yield
    with fleet.join() as client:
        eventually(lambda: not held(client), "nothing is held")
        client.audit().result(SECONDS)
    for server in fleet.living:
        generate(server, [prompt(3, "well")], max_tokens=1)


def held(client: NodeClient) -> float:
    """Leases and rooms."""
    stats = client.stats().result(SECONDS)
    return stats["leases"] + stats["rooms"]


def prompt(tokens: int, seed: str) -> Prompt:
    return random.Random(seed).choices(range(1000, 40000), k=tokens)


def generate(server: Worker, prompts: Sequence[Prompt], **options: Any) -> dict[str, Any]:
    return sound(server.ask("generate", prompts=list(prompts), **options))


def sound(answer: dict[str, Any]) -> dict[str, Any]:
    """The connector has not failed in itself, which would be a miss to vLLM."""
    assert not answer["counts"].get("vllm:moonpool_faults", 0)
    return answer


def external(answer: dict[str, Any]) -> int:
    """Tokens that vLLM says came from the connector."""
    return int(answer["counts"]["vllm:external_prefix_cache_hits"])


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a log-probability that both have; infinite where their tokens differ."""
    worst = 0.0
    for mine, theirs in zip(one["outputs"], other["outputs"], strict=True):
        if mine["tokens"] != theirs["tokens"]:
            return float("inf")
        for here, there in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            worst = max(worst, *(abs(here[token] - there[token]) for token in here.keys() & there.keys()))
    return worst


@pytest.mark.core
def test_what_one_has_computed_the_other_loads(fleet: Fleet) -> None:
    prompts = [prompt(tokens, f"border {tokens}") for tokens in BORDERS]
    expected = generate(fleet.alone, prompts)
    cold = generate(fleet.one, prompts)
    assert (external(cold), distance(expected, cold) < TOLERANCE) == (0, True)
    warm = generate(fleet.other, prompts)
    assert external(warm) == sum(hit_limit(tokens, SIZE) * SIZE for tokens in BORDERS)
    assert [output["cached_tokens"] for output in warm["outputs"]] == [hit_limit(n, SIZE) * SIZE for n in BORDERS]
    assert distance(expected, warm) < TOLERANCE
    # One that has forgotten, as after a restart.
    fleet.one.order("forget")
    again = generate(fleet.one, prompts)
    assert (external(again), distance(expected, again) < TOLERANCE) == (external(warm), True)


@pytest.mark.core
def test_a_second_turn_hits_the_first_ones_answer(fleet: Fleet) -> None:
    first = prompt(200, "turns")
    answer = generate(fleet.one, [first], max_tokens=60)["outputs"][0]["tokens"]
    second = [first + answer + prompt(40, "turns, second")]
    warm = generate(fleet.other, second)
    assert external(warm) == 2 * SIZE
    assert distance(generate(fleet.alone, second), warm) < TOLERANCE


def test_another_salt_shares_nothing(fleet: Fleet) -> None:
    salted = [prompt(300, "salt")]
    generate(fleet.one, salted, salt="a")
    assert external(generate(fleet.other, salted)) == 0
    assert external(generate(fleet.other, salted, salt="b")) == 0
    assert external(generate(fleet.other, salted, salt="a")) == 2 * SIZE


def test_long_prompts_and_many_at_once_at_both(fleet: Fleet) -> None:
    """What is loaded, some of it in several leases, beside what is computed."""
    long = prompt(3000, "long")
    known = [long, *(long[: 5 * SIZE] + prompt(70, f"tail {at}") for at in range(4))]
    with ThreadPoolExecutor() as threads:
        expected, cold = threads.map(generate, (fleet.alone, fleet.one), [known] * 2)
        assert distance(expected, cold) < TOLERANCE
        fleet.one.order("forget")
        mixed = [*known, prompt(300, "cold")]
        expected, *answers = threads.map(generate, (fleet.alone, fleet.one, fleet.other), [mixed] * 3)
    for answer in answers:
        assert distance(expected, answer) < TOLERANCE
        assert external(answer) >= hit_limit(3000, SIZE) * SIZE


@pytest.mark.core
def test_a_block_that_is_corrupted_changes_the_answer(fleet: Fleet) -> None:
    """Or else the other tests would say nothing."""
    prompts = [prompt(300, "corrupted")]
    expected = generate(fleet.alone, prompts)
    with fleet.join() as client:
        before = client.arena.copy()
        generate(fleet.one, prompts)
        changed = (client.arena != before).nonzero()[0]
        assert changed.size
        # The highest bit of each float's fraction.
        client.arena[changed[changed % 4 == 2]] ^= 0x40
    warm = generate(fleet.other, prompts)
    assert external(warm) == 2 * SIZE
    assert distance(expected, warm) > DIFFERENCE


def test_a_node_that_stands_still_and_one_that_dies_cost_no_right_answer(fleet: Fleet) -> None:
    prompts = [prompt(300, "still"), prompt(140, "still too")]
    expected = generate(fleet.alone, prompts)
    generate(fleet.one, prompts)
    os.kill(fleet.process.pid, signal.SIGSTOP)
    try:
        still = generate(fleet.other, prompts)
    finally:
        os.kill(fleet.process.pid, signal.SIGCONT)
    assert distance(expected, still) < TOLERANCE
    # It was said to have them, and could not give them.
    assert still["counts"]["vllm:moonpool_failed_blocks"] == 3
    fleet.process.kill()
    fleet.process.wait(SECONDS)
    fleet.other.order("forget")
    dead = generate(fleet.other, prompts)
    assert (external(dead), distance(expected, dead) < TOLERANCE) == (0, True)
    fleet.start_node()
    fresh = [prompt(300, "fresh")]
    expected = generate(fleet.alone, fresh)

    def is_shared() -> bool:
        """Again, once both have found the new node."""
        for server in (fleet.one, fleet.other):
            server.order("forget")
        generate(fleet.one, fresh)
        warm = generate(fleet.other, fresh)
        assert distance(expected, warm) < TOLERANCE
        return external(warm) == 2 * SIZE

    until = time.monotonic() + 60
    while not is_shared():
        assert time.monotonic() < until


def test_a_slow_node_costs_no_right_answer(fleet: Fleet) -> None:
    prompts = [prompt(700, "slow"), prompt(300, "slow too")]
    expected = generate(fleet.alone, prompts)
    with slowed(fleet.process.pid):
        assert distance(expected, generate(fleet.one, prompts)) < TOLERANCE
        assert distance(expected, generate(fleet.other, prompts)) < TOLERANCE
    for server in (fleet.one, fleet.other):
        server.order("forget")
        answer = generate(server, prompts)
        assert distance(expected, answer) < TOLERANCE
    assert external(answer) == (hit_limit(700, SIZE) + hit_limit(300, SIZE)) * SIZE


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """A tenth of the time it runs, nine it stands still."""
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.wait(0.03):
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(0.27)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_full_node_costs_hits_and_no_right_answer(fleet: Fleet) -> None:
    prompts = [prompt(300, "full")]
    expected = generate(fleet.alone, prompts)
    large = KeySpace(KeySpaceId("f0" * 16), SIZE, runs=4, run_bytes=1 << 20)
    with fleet.join() as client:
        # All that nobody reads is evicted for it, and there is no room for all of it.
        blocks = DRAM_BYTES // large.block_bytes + 1
        with client.open_room(large, keys_of("all", blocks)).result(SECONDS) as room:
            assert (room.view(0) is not None, room.view(blocks - 1) is None) == (True, True)
            full = generate(fleet.one, prompts)
            assert distance(expected, full) < TOLERANCE
            assert not full["counts"].get("vllm:moonpool_saved_blocks", 0)
            none = generate(fleet.other, prompts)
            assert (external(none), distance(expected, none) < TOLERANCE) == (0, True)
        eventually(lambda: not held(client), "it is empty again")
    for server, found in ((fleet.one, 0), (fleet.other, 2)):
        server.order("forget")
        answer = generate(server, prompts)
        assert (external(answer), distance(expected, answer) < TOLERANCE) == (found * SIZE, True)


def test_a_server_that_is_killed_leaves_nothing_behind(fleet: Fleet) -> None:
    prompts = [prompt(1500, "killed")]
    expected = generate(fleet.alone, prompts)
    fleet.one.send("generate", prompts=prompts)
    with fleet.join() as client:
        eventually(lambda: client.stats().result(SECONDS)["rooms"] > 0, "it stores")
        fleet.one.kill()
        fleet.living.remove(fleet.one)
        eventually(lambda: not client.stats().result(SECONDS)["rooms"], "what it had is free")
        assert client.stats().result(SECONDS)["leases"] == 0
        client.audit().result(SECONDS)
    assert distance(expected, generate(fleet.other, prompts)) < TOLERANCE


def test_another_version_is_refused_before_anything_else(vllm: Peer) -> None:
    """With this one's classes, in its own environment."""
    script = """if True:
        import types, vllm
        vllm.__version__ = "0.33.0"
        from moonpool.connectors.vllm import MoonpoolConnector
        transfer = types.SimpleNamespace(kv_connector_extra_config={"node": "/run/pool/node-0.sock"})
        MoonpoolConnector(types.SimpleNamespace(kv_transfer_config=transfer), None, None)
    """
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        environment = {**vllm_cpu.environment(vllm, 1), "PYTHONPATH": vllm_cpu.connector_path(vllm, Path(folder))}
        done = subprocess.run(
            [str(vllm.python), "-P", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
    assert "ConfigError: vLLM 0.33.0: this Moonpool is tested with vLLM 0.32; install one of those" in done.stderr


@pytest.mark.skipif(not SOAK, reason="three more processes: make test-vllm with MOONPOOL_SOAK=1")
def test_ranks_fill_blocks_together(fleet: Fleet) -> None:
    """SmolLM2's nine heads are divided among three."""
    prompts = [prompt(300, "ranks")]
    expected = generate(fleet.alone, prompts)
    assert external(generate(fleet.other, prompts)) == 0
    divided = fleet.start("divided", ranks=3)
    cold = generate(divided, prompts)
    divided.order("forget")
    warm = generate(divided, prompts)
    # Blocks of another shape than its own are none of its.
    assert (external(cold), external(warm)) == (0, 2 * SIZE)
    assert max(distance(expected, cold), distance(expected, warm)) < TOLERANCE
