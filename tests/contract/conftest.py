from __future__ import annotations

from ..store.conftest import conductor, join, node, run_dir

__all__ = ["conductor", "join", "node", "run_dir"]
