"""What the documentation tells a reader to type: the fenced blocks of each page, and the commands in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [str(file.relative_to(ROOT)) for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
LANGUAGES = ("sh", "python", "yaml", "json", "")
"""Without a language: drawings, and sessions, in which a line that is typed begins with `$ `."""
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"^# (?:.* )?([\w-]+\.(?:py|yaml))\b")
ASSIGNMENT = re.compile(r"\w+=")
ENDS = {">", ">>", "|", "&", "&&", ";"}


class Command(NamedTuple):
    where: str
    text: str

    @property
    def words(self) -> list[str]:
        """Up to where a shell would see its end, without assignments before it."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        words = words[: next((at for at, word in enumerate(words) if word in ENDS), None)]
        return list(dropwhile(ASSIGNMENT.match, words))


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """That a comment in its first line names."""
        found = FILE_NAME.match(self.text)
        return found[1] if found else f"block-{self.line}.{'py' if self.language == 'python' else self.language}"

    @property
    def commands(self) -> list[Command]:
        """Each as it is typed, over several lines where it has them; without comments of whole lines."""
        lines, typed = self.text.splitlines(), list[str]()
        match self.language:
            case "sh":
                typed = list(_whole(lines))
            case "":
                typed = [line[2:] for line in lines if line.startswith("$ ")]
            case "python":
                typed = [f"python {self.file}"]
        return [Command(self.where, text) for text in typed]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], textwrap.dedent(found[3]))
        for found in FENCE.finditer(text)
    ]


def file_of(page: str, name: str) -> str:
    """What the page shows of this file."""
    return "".join(block.text for block in blocks_of(page) if block.file == name)


def commands() -> list[Command]:
    """Of all fenced blocks."""
    return [command for page in PAGES for block in blocks_of(page) for command in block.commands]


def mentions_of(page: str) -> list[Command]:
    """Commands of ours, and flags alone, between backticks in running text and tables."""
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), (ROOT / page).read_text())
    return [
        Command(f"{page}:{at}", text)
        for at, line in enumerate(prose.splitlines(), 1)
        for text in re.findall(r"`((?:moonpool |make |--)[^`]*)`", line)
    ]


def _whole(lines: Iterable[str]) -> Iterator[str]:
    pending = ""
    for line in lines:
        pending += line
        if not line.endswith("\\"):
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quotation goes on in the next line
                words = None
            if words is not None:
                if words:
                    yield pending
                pending = ""
                continue
        pending += "\n"
    assert not pending, f"a command without end: {pending}"
