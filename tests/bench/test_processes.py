"""The bench's processes: what goes wrong in them is said, and none is left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moonpool.bench.peer import Peer, PeerMissingError, PeerUnreachableError, run_or_explain
from moonpool.bench.process import running, worker
from moonpool.errors import MoonpoolError

STORE = """
from moonpool.bench.walk import serve
class Side:
    def put(self, keys, pieces):
        print("a library's chatter")
        return lambda: None
    def exists(self, keys, size):
        raise RuntimeError("the store is out of order")
    def remove(self, keys, size):
        import os
        os._exit(3)
    def close(self):
        pass
serve(lambda buffers: Side(), 4096)
"""
WHAT = {"name": "a", "size": 1024, "batch": 1, "calls": 1}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which `-m side` is the store above. Its path is kept: the worker adds this package's."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "side.py").write_text(STORE)
    return dict(os.environ)


def test_a_worker_answers_orders_and_ends_with_its_block(tmp_path: Path, environment: dict[str, str]) -> None:
    with worker("side", tmp_path, "side", [], sys.executable, environment) as started:
        assert len(started.order("put", **WHAT)) == 4
        process = started._process
    assert process.returncode == 0
    assert "chatter" in (tmp_path / "side.log").read_text()


def test_what_a_store_raises_is_told_and_the_worker_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    with worker("side", tmp_path, "side", [], sys.executable, environment) as started:
        with pytest.raises(MoonpoolError, match="exists failed: RuntimeError: the store is out of order"):
            started.order("exists", **WHAT)
        assert started.order("put", **WHAT)


def test_a_worker_that_dies_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    with (
        worker("side", tmp_path, "side", [], sys.executable, environment) as started,
        pytest.raises(MoonpoolError, match="side ended during remove"),
    ):
        started.order("remove", **WHAT)


def test_a_process_ends_with_its_block_whatever_happens_in_it(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        running([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log") as process,
    ):
        raise KeyError
    assert process.returncode is not None


def test_an_installation_that_fails_gives_the_reason(tmp_path: Path) -> None:
    script = "import sys; print('fetching', file=sys.stderr); sys.exit('no such package')"
    with pytest.raises(PeerMissingError, match="pip cannot install it: no such package"):
        run_or_explain([sys.executable, "-c", script], Peer(tmp_path), "pip cannot install it")


@pytest.mark.parametrize(
    ("said", "is_networks_fault"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\nERROR: No matching",
            True,
        ),
        ("ERROR: HTTP error 503 while getting https://index/x.whl", True),
        ("ERROR: No matching distribution found for x==9", False),
        ("ERROR: Could not install packages due to an OSError: No space left on device", False),
    ],
)
def test_what_the_network_is_to_blame_for_is_told_apart(tmp_path: Path, said: str, is_networks_fault: bool) -> None:
    with pytest.raises(PeerMissingError) as raised:
        run_or_explain([sys.executable, "-c", f"import sys; sys.exit({said!r})"], Peer(tmp_path), "no luck")
    assert isinstance(raised.value, PeerUnreachableError) == is_networks_fault


def test_what_takes_too_long_to_fetch_is_the_networks_fault(tmp_path: Path) -> None:
    with pytest.raises(PeerUnreachableError, match=r"not done after 0\.2 s"):
        run_or_explain([sys.executable, "-c", "import time; time.sleep(60)"], Peer(tmp_path), "no luck", seconds=0.2)
