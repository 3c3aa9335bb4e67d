"""Clusters with API keys: who asks, and what the operator sees of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from moonpool.bench.cluster import RunningCluster
from tests.keys import bearer, make_key
from tests.live.kit import HANG, cached_tokens, eventually


class Tenants:
    """A cluster and who asks it."""

    def __init__(self, cluster: RunningCluster, file: Path, journal: Path, admin: str) -> None:
        self.cluster = cluster
        self.file = file
        self.journal = journal
        self.admin = admin
        self.keys = [admin]

    def key(self, name: str, **fields: Any) -> str:
        """A new one; returns when it is taken."""
        key = make_key(self.file, name, **fields)
        self.keys.append(key)
        eventually(lambda: self.status(key) == 200, f"the key of {name} is taken")
        return key

    def status(self, key: str) -> int:
        return httpx.get(f"{self.cluster.url}/v1/models", headers=bearer(key), timeout=HANG).status_code

    def complete(self, key: str, prompt: list[int], **fields: object) -> dict[str, Any]:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 3, "temperature": 0, **fields}
        response = httpx.post(f"{self.cluster.url}/v1/completions", json=body, headers=bearer(key), timeout=HANG)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def cached(self, key: str, prompt: list[int], **fields: object) -> int:
        return cached_tokens(self.complete(key, prompt, **fields))

    def directory(self) -> frozenset[str]:
        """The keys of all blocks in the pool."""
        found: set[str] = set()
        after: str | None = ""
        while after is not None:
            page = self.look(f"/cluster/blocks?after={after}")
            found |= {block["key"] for block in page["blocks"]}
            after = page["next"]
        return frozenset(found)

    def look(self, path: str) -> Any:
        response = httpx.get(self.cluster.url + path, headers=bearer(self.admin), timeout=HANG)
        assert response.status_code == 200, response.text
        return response.json()

    def grows_by(self, before: frozenset[str], blocks: int) -> frozenset[str]:
        """Wait until the pool has so many more blocks than before; which."""
        eventually(lambda: len(self.directory() - before) == blocks, f"{blocks} blocks more")
        return self.directory() - before
