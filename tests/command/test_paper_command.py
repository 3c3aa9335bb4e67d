"""`moonpool paper` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.command import paper as command
from moonpool.command.paper import Wanted, paper
from moonpool.errors import ConfigError


def wanted(folder: Path) -> Wanted:
    return Wanted(folder, "a800-llama2-70b", 1, 1, "1", None, as_json=True, jobs=1)


def test_a_folder_of_traces_gives_chapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST_REQUESTS", 30)
    lines = [
        {
            "timestamp": 3000 * at,
            "input_length": 32_768,
            "output_length": 3,
            "hash_ids": [at % 3, *range(100 * at + 100, 100 * at + 163)],
        }
        for at in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "sample.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert paper(wanted(tmp_path)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trace"] == str(tmp_path / "a.jsonl")
    assert [chapter["title"].split(":")[0] for chapter in report["chapters"]] == [
        "§2, table 1",
        "Figure 2",
        "Figure 8",
        "§5, table 3 and figure 9",
    ]
    balanced = next(f for f in report["chapters"][2]["findings"] if f["what"] == "mean TTFT, load-balance")
    assert 40 < float(balanced["ours"].split()[0]) <= 60.41, "the load is chosen by this figure"


def test_a_folder_without_traces_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trace with block ids"):
        paper(wanted(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        paper(wanted(tmp_path / "none"))
