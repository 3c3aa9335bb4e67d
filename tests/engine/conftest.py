"""The model, one engine and the reference, once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.engine.runner import TorchEngine
from tests.exactness import Reference


@pytest.fixture(scope="session")
def engine(smollm2: Path) -> TorchEngine:
    return TorchEngine(smollm2, page_count=96, poison=True)


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)
