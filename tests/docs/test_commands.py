"""What the documentation tells a reader to type exists: commands, flags, values, files. That it works: test_pages."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool.command.classes import read_classes
from moonpool.command.hardware import sized
from moonpool.command.instances import read_instances
from moonpool.command.settings import duration, read_config
from moonpool.connectors.settings import read_settings
from moonpool.gateway.keys.file import KeyFile
from moonpool.gateway.replies import ChatCompletion
from moonpool.gateway.shown import CachedContext, Problem
from tests.docs.command_line import flags_of, parse
from tests.docs.fates import ELSEWHERE, NOT_RUN
from tests.docs.pages import LANGUAGES, PAGES, ROOT, Block, Command, blocks_of, commands, file_of, mentions_of

DOCKERFILE = (ROOT / "deploy/vllm/Dockerfile").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
JSON: dict[str, list[Any]] = {
    "docs/api.md": [ChatCompletion, Problem],
    "docs/caching.md": [CachedContext],
    "docs/security.md": [KeyFile],
}
"""What the blocks of a page are, in their order."""
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NO_SESSION = re.compile(r"^(moonpool|make|curl|pip|python3?|vllm) ", re.MULTILINE)
BENCHMARKS = "".join(file.read_text() for file in (ROOT / "src/moonpool/bench").glob("*.py"))
FLAGS = flags_of() | set(re.findall(r'"(--[a-z-]+)"', BENCHMARKS))
OF_OTHERS = {"--enable-prompt-tokens-details", "--kv-events-config", "--parallel"}
"""Flags of vLLM and llama.cpp that are mentioned."""

OTHERS = {"aiperf", "curl", "export", "mkdir", "pip", "python", ".venv/bin/python"}
"""Programs whose words are not looked at here."""


def places(found: Iterable[Block | Command]) -> list[Any]:
    return [pytest.param(each, id=each.where) for each in found]


# ---- what is typed


def check(words: list[str]) -> None:
    match words:
        case ["moonpool", *rest]:
            parse(rest)
        case ["make", target, *variables]:
            assert target in TARGETS
            arguments = [shlex.split(each.removeprefix("ARGS=")) for each in variables if each.startswith("ARGS=")]
            if target == "serve":
                parse(["serve", *(arguments[0] if arguments else [])])
        case ["pip", "install", *rest]:
            names = [each for each in rest if not each.startswith("-")]
            assert names
            for name in names:
                if "==" in name:
                    assert name in DOCKERFILE
                    continue
                path, _, extra = name.partition("[")
                assert (ROOT / path).exists(), name
                assert not extra or extra.removesuffix("]") in EXTRAS, name
        case ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", _, "--kv-transfer-config", text]:
            read_settings(json.loads(text)["kv_connector_extra_config"])
        case _:
            assert not words or words[0] in OTHERS, f"nobody knows {words[0]}"


@pytest.mark.parametrize("command", places(commands()))
def test_what_is_typed_is_read_by_what_it_names(command: Command) -> None:
    check(command.words)


@pytest.mark.parametrize("page", PAGES)
def test_what_is_mentioned_exists(page: str) -> None:
    """What is left out is no reason to object; a flag, a command or a value that is not there is."""
    assert {mention: wrong for mention in mentions_of(page) if (wrong := objection(mention.text))} == {}


def objection(mention: str) -> str:
    """That there is to it; empty: none."""
    words = mention.partition("…")[0]
    if words.startswith("--"):
        flag = shlex.split(words)[0].partition("=")[0]
        return "" if flag in FLAGS | OF_OTHERS else "no such flag"
    given = ["1" if re.fullmatch("[A-Z_]+", word) else word for word in shlex.split(words) if word != "--help"]
    try:
        check(given)
    except Exception as e:
        if type(e).__name__ not in ("MissingParameter", "BadOptionUsage"):
            return f"{type(e).__name__}: {e}"
    return ""


@pytest.mark.parametrize("block", places(BLOCKS))
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES
    if not block.language:
        assert not NO_SESSION.search(block.text), "commands are in a block of `sh`, or begin with `$ `"


@pytest.mark.parametrize("beginning", [*ELSEWHERE, *NOT_RUN])
def test_what_is_left_out_is_there_and_is_run_by_the_test_that_is_named(beginning: str) -> None:
    assert any(command.text.startswith(beginning) for command in commands()), "no page has it: take it out"
    if beginning in NOT_RUN:
        return
    test, words = ELSEWHERE[beginning]
    file, _, name = test.partition("::")
    source = (ROOT / file).read_text()
    assert f"def {name}(" in source
    assert [word for word in words if word not in source] == []


# ---- what is written into files, and what comes back


READERS: dict[str, Callable[[Path], object]] = {
    "moonpool.yaml": lambda file: sized(read_config(file, {})),
    "classes.yaml": lambda file: read_classes(str(file), "", duration),
    "vllm.yaml": read_instances,
}
"""Of other files commands of their page are the readers."""


@pytest.mark.parametrize("block", places(each for each in BLOCKS if each.language == "yaml"))
def test_yaml_is_taken(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = READERS.get(block.file)
    if read is None:
        assert any(block.file in command.words for each in blocks_of(block.page) for command in each.commands)
        return
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("VLLM_KEY", "secret")
    file = tmp_path / block.file
    file.write_text(file_of(block.page, block.file).replace("/models/qwen3-8b", str(tmp_path)))
    read(file)


@pytest.mark.parametrize("page", PAGES)
def test_json_is_what_the_code_writes(page: str) -> None:
    texts = [block.text for block in blocks_of(page) if block.language == "json"]
    types = JSON.get(page, [])
    assert len(texts) == len(types)
    for text, kind in zip(texts, types, strict=True):
        whole = text.replace('"9b1c…"', f'"{"9b" * 32}"').replace("$…$…", f"${'A' * 22}${'A' * 43}")
        assert json.loads(msgspec.json.encode(msgspec.json.decode(whole, type=kind))) == json.loads(whole)
