"""`moonpool simulate --coupled`: a column for each combination."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.cli import app
from moonpool.command.choices import numbers, some_of
from moonpool.errors import ConfigError


def test_each_mode_chunk_and_routing_has_its_column(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 3000, "output_length": 20, "hash_ids": [1, 2, 3, 4, 5, 6]}
    file.write_text("".join(json.dumps(line | {"timestamp": 500 * i}) + "\n" for i in range(8)))
    flags = "--prefill 1 --decode 1 --coupled 2 --coupled-mode prefill-first,chunked --chunk 256,512"
    done = CliRunner().invoke(
        app, ["simulate", str(file), *flags.split(), "--routing", "round-robin,prefix-affine", "--json", "--jobs", "1"]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [run["name"] for run in report["runs"][1:]] == [
        "coupled prefill-first round-robin",
        "coupled prefill-first prefix-affine",
        "coupled chunked 256 round-robin",
        "coupled chunked 256 prefix-affine",
        "coupled chunked 512 round-robin",
        "coupled chunked 512 prefix-affine",
    ]
    assert all(run["summary"]["completed"] == 8 for run in report["runs"])


def test_a_wrong_word_is_named_with_what_it_may_be() -> None:
    with pytest.raises(ConfigError, match="--routing 'sticky': must be of round-robin, prefix-affine"):
        some_of("--routing", "round-robin, sticky", ("round-robin", "prefix-affine"))
    with pytest.raises(ConfigError, match="--chunk '-1': must be whole numbers from 1 on"):
        numbers("--chunk", "256,-1", 1)
