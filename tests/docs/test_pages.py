"""Each page of the documentation works when all that it shows is typed in order: commands, scripts, files."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.docs.fates import is_left_out
from tests.docs.pages import PAGES, blocks_of
from tests.docs.stand import Stand

TELLS = {
    "README.md": r"Paris.*\[True, False\].*TTFT, mean",
    "docs/api.md": r"finish_reason.*\"(length|stop)\"",
    "docs/capacity.md": r"TTFT, mean",
    "docs/operations.md": r"x-request-id req-5f0e\): finished",
    "docs/pool.md": r"2 of 2 blocks",
}
"""What a page is to print, besides that nothing fails."""
RUN = {block.page for page in PAGES for block in blocks_of(page) for c in block.commands if not is_left_out(c.text)}


@pytest.mark.live
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", sorted(RUN))
def test_a_page_works_as_it_stands(page: str, smollm2: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as folder:
        said = Stand(Path(folder), smollm2).follow(page)
    assert re.search(TELLS.get(page, ""), said, re.DOTALL), said[-4000:]
