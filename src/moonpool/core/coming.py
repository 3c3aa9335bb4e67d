"""Blocks that a prefill instance is still computing, and for which request (PAPER §9: they count as hits behind it)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from moonpool.core.vocabulary import BlockKey, RequestId


@dataclass(slots=True)
class Coming:
    """Of one prefill instance."""

    tokens: int = 0
    """To compute, of all requests together."""
    _producers: dict[BlockKey, RequestId] = field(default_factory=dict)
    """Each block is computed by the first request that has it; those behind wait for that."""
    _requests: dict[RequestId, tuple[int, tuple[BlockKey, ...]]] = field(default_factory=dict)

    def add(self, request: RequestId, tokens: int, keys: tuple[BlockKey, ...]) -> None:
        """`tokens` to compute; `keys` of the blocks that are not there yet."""
        producers = self._producers
        for key in keys:
            producers.setdefault(key, request)
        self._requests[request] = tokens, keys
        self.tokens += tokens

    def remove(self, request: RequestId) -> None:
        """It has computed them, or will not."""
        tokens, keys = self._requests.pop(request)
        self.tokens -= tokens
        producers = self._producers
        for key in keys:
            if producers.get(key) == request:
                del producers[key]

    def extend(self, keys: Sequence[BlockKey], resident: int) -> tuple[int, RequestId | None]:
        """The leading run of `keys`, the first `resident` being there, and who computes its last block."""
        producers, end, last = self._producers, resident, None
        while end < len(keys) and (producer := producers.get(keys[end])) is not None:
            end, last = end + 1, producer
        return end, last

    def check_integrity(self, requests: Collection[RequestId]) -> None:
        """Raises AssertionError unless it knows exactly these requests."""
        assert self._requests.keys() == set(requests)
        assert self.tokens == sum(tokens for tokens, _ in self._requests.values()) >= 0
        for key, request in self._producers.items():
            assert key in self._requests[request][1], f"{request} does not compute {key!r}"
