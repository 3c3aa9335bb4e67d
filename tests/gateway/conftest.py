from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.gateway.tokenizer import Tokenizer
from tests.gateway.kit import Answer, Stage, stage

Open = Callable[..., contextlib.AbstractAsyncContextManager[Stage]]


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture
def opened(smollm2: Path, tokenizer: Tokenizer) -> Open:
    """`async with opened(answer=…, request_timeout=…) as stage:`"""

    @contextlib.asynccontextmanager
    async def open_stage(*, answer: Answer | None = None, **options: Any) -> AsyncIterator[Stage]:
        async with stage(smollm2, tokenizer, answer=answer, **options) as scene:
            yield scene

    return open_stage
