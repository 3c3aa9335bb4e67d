"""Copies that go past the processor's cache, made at run time where llvmlite is installed (the extra `fast`).

What is written the usual way is first read into the cache, a line at a time, to be overwritten there: a third of what
the memory has to carry. The C library leaves that out for copies of a size that it takes from the machine, and on a
virtual machine believes to be hundreds of MiB (glibc 2.36: 240 MB on 2 processors of an EPYC). Nothing that numpy or
torch offers leaves it out. docs/decisions/0026.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from moonpool.messenger.transfer import Bytes

log = logging.getLogger(__name__)

LINE_BYTES = 64
_FENCES = {"x86_64": "call void @llvm.x86.sse.sfence()"}
"""Puts such writes before those that follow; elsewhere the general fence does."""
_CODE = """
declare void @llvm.x86.sse.sfence()
define void @copy(ptr noalias %target, ptr noalias %source, i64 %nbytes) {{
before:
  br label %lines
lines:
  %at = phi i64 [ 0, %before ], [ %next, %lines ]
  %from = getelementptr i8, ptr %source, i64 %at
  %to = getelementptr i8, ptr %target, i64 %at
  %line = load <64 x i8>, ptr %from, align 1
  store <64 x i8> %line, ptr %to, align 64, !nontemporal !0
  %next = add i64 %at, 64
  %is_more = icmp ult i64 %next, %nbytes
  br i1 %is_more, label %lines, label %after
after:
  fence seq_cst
  {own}
  ret void
}}
!0 = !{{i32 1}}
"""

Copy = Callable[[Bytes, Bytes], None]
"""Target and source, of one size."""


@functools.cache
def copy_past_cache() -> Copy | None:
    """None where there is no such copy. The first call takes some 50 ms. The copy lets go of the interpreter."""
    try:
        engine = _compiled()
    except ImportError:
        return None
    except (RuntimeError, OSError) as e:
        log.warning("copies go through the processor's cache: llvmlite cannot make others here: %s", e)
        return None
    copy_lines = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
        engine.get_function_address("copy")
    )

    def copy(target: Bytes, source: Bytes) -> None:
        assert engine, "the code lives as long as it does"
        nbytes = source.nbytes
        if target.nbytes != nbytes or not target.flags.writeable:
            raise ValueError(f"{nbytes} bytes cannot be copied into {target.nbytes}, or they are read-only")
        to = _address(target)
        head = min(-to % LINE_BYTES, nbytes)
        lines = (nbytes - head) // LINE_BYTES * LINE_BYTES
        if lines:
            copy_lines(to + head, _address(source) + head, lines)
        for rest in (slice(0, head), slice(head + lines, nbytes)):
            if rest.start < rest.stop:
                np.copyto(target[rest], source[rest])

    return copy


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _compiled() -> Any:
    """Owns the machine code."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_CODE.format(own=_FENCES.get(platform.machine(), "")))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
