"""A real Chromium. Where there is none the tests are skipped and say so, except with MOONPOOL_BROWSER=required (CI)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ended with its module: while it is there a loop runs in this thread, and `asyncio.run` would be refused."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _lacking("playwright is not installed: make test-browser installs it")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        _lacking("there is no Chromium: apt-get install chromium, or make test-browser as root")
    with sync_playwright() as playwright:
        # Containers give neither user namespaces nor a large /dev/shm.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


def _lacking(what: str) -> None:
    if os.environ.get("MOONPOOL_BROWSER") == "required":
        pytest.fail(what)
    pytest.skip(what)
