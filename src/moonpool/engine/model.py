"""Where models come from: the one that `pull` brings, a local directory, a hub id. Imports torch only to convert.

A model is a directory with `config.json`, a tokenizer and safetensors (or one GGUF file).
"""

from __future__ import annotations

import difflib
import hashlib
import os
import struct
from pathlib import Path

from moonpool.engine import fetching
from moonpool.errors import ModelError

PULLABLE = ("smollm2",)
SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 64
HEADER_LIMIT_BYTES = 100 << 20


def home() -> Path:
    """MOONPOOL_HOME, else `moonpool` in the user's cache directory."""
    chosen = os.environ.get("MOONPOOL_HOME")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "moonpool"


def pull(name: str = "smollm2", progress: bool = True) -> Path:
    """The model's directory, downloaded, checked and converted unless it is there. `progress`: a bar on stderr.

    Raises `ModelError` where the name is unknown, the download fails or is not what it should be, or the disk is full.
    """
    if name not in PULLABLE:
        raise ModelError(f"no model {name!r} to pull; there is: {', '.join(PULLABLE)}")
    return fetching.pull_smollm2(home() / "models", progress)


def resolve(model: str, progress: bool = True) -> Path:
    """A directory for `smollm2` (pulled if missing), a local directory, or a hub id `owner/name`.

    Raises `ModelError`, one line, where there is no such model.
    """
    if model in PULLABLE:
        return pull(model, progress)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _checked(path.resolve())
    if model and path.exists():
        raise ModelError(f"{model} is a file; --model takes a directory with config.json and *.safetensors or *.gguf")
    if not fetching.HUB_ID.fullmatch(model):
        near = difflib.get_close_matches(model, PULLABLE, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelError(
            f"no model {model!r}: not a directory here, not one of {', '.join(PULLABLE)}, not a hub id{hint}"
        )
    return _checked(fetching.from_hub(model, home() / "hub"))


def fingerprint(path: Path) -> str:
    """Hex identity of the weights: configuration, safetensors headers, sizes, and sampled content of each file.

    Cheap (some hundred KiB are read) and the same for equal copies in other directories.
    """
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    if not files:
        raise ModelError(f"{path} has no *.safetensors and no *.gguf")
    digest = hashlib.sha256()
    for name in ("config.json",):
        if (path / name).is_file():
            digest.update((path / name).read_bytes())
    for file in files:
        _digest_file(digest, file)
    return digest.hexdigest()


def _digest_file(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(struct.pack("<Q", size))
    with file.open("rb") as stream:
        start = 0
        if file.suffix == ".safetensors":
            length = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))[0]
            if length > min(HEADER_LIMIT_BYTES, size):
                raise ModelError(f"{file} is not a safetensors file: its header would be {length} bytes")
            digest.update(stream.read(length))
            start = 8 + length
        step = max(SAMPLE_BYTES, (size - start) // SAMPLES_PER_FILE)
        for offset in range(start, size, step):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE_BYTES))


def _checked(path: Path) -> Path:
    gguf = list(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and not gguf:
        raise ModelError(f"{path} has no config.json; a model directory has config.json and *.safetensors or *.gguf")
    if not gguf and not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
        hint = "; pickled weights are never loaded, convert them to safetensors" if pickled else ""
        raise ModelError(f"{path} has no *.safetensors and no *.gguf{hint}")
    return path
