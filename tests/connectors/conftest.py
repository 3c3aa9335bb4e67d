from __future__ import annotations

from ..store.conftest import conductor, deciding, node, run_dir

__all__ = ["conductor", "deciding", "node", "run_dir"]
