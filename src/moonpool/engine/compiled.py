"""native.c as a library, compiled once for the machine that it runs on.

It needs GCC, whose OpenMP threads are torch's own. What was compiled lies in `kernels` of Moonpool's cache directory,
under a name that changes with source, compiler and processor.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from moonpool.engine.model import home

COMPILE_SECONDS = 60.0
OPTIONS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
SOURCE = Path(__file__).with_name("native.c")


class LackError(Exception):
    """Why there are no kernels, and what would help."""


def compiled() -> Path:
    """The library, compiled unless it was before. Raises LackError."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise LackError("there is no gcc to compile kernels with; install it")
    folder = home() / "kernels"
    try:
        version = subprocess.run([compiler, "-v"], capture_output=True, timeout=COMPILE_SECONDS, check=True).stderr
        known = hashlib.sha256(SOURCE.read_bytes() + version + " ".join(OPTIONS).encode() + _processor()).hexdigest()
        library = folder / f"{known[:32]}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                made = Path(place) / library.name
                command = [compiler, *OPTIONS, str(SOURCE), "-o", str(made), "-lm"]
                subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS, check=True)
                made.replace(library)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        raise LackError(f"{compiler} does not compile them: {said[0] if said else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LackError(f"they cannot be compiled into {folder}: {error}") from error
    return library


def _processor() -> bytes:
    """What `-march=native` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})).encode()
