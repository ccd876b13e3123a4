"""Compiles `csrc/` once per machine, with the system's C++ compiler and nothing else.

Instruction sets are chosen by what torch reports at run time, never by `-march=native`: some virtual machines
announce instructions that they can't execute.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"]
_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2, "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "AVX512_BF16": [*_AVX512, "-mavx512bf16"],
    "AVX512": _AVX512,
    "AVX2": _AVX2,
    "DEFAULT": [],
}
"""Compiler flags, from most to least; each machine that has one also has those below it."""
_COMPILE_SECONDS = 300


class KernelBuildError(Exception):
    """The C++ kernels can't be had on this machine; the message says why."""


@functools.cache
def load_cpu_kernels() -> ctypes.CDLL:
    """The library, compiled at the first call on this machine (a few seconds). Raises `KernelBuildError`."""
    first, *fewer = supported_instruction_sets()
    try:
        return load_cpu_kernels_for(first)
    except KernelBuildError:
        # A compiler may be older than the machine: GCC knows AVX512-BF16 from version 10 on.
        if first != "AVX512_BF16":
            raise
        return load_cpu_kernels_for(fewer[0])


def load_cpu_kernels_for(instruction_set: str) -> ctypes.CDLL:
    """`instruction_set`: one of `supported_instruction_sets()`. Raises `KernelBuildError`."""
    try:
        return _load(_built(INSTRUCTION_SETS[instruction_set]))
    except OSError as error:
        raise KernelBuildError(f"the compiled kernels can't be loaded: {error}") from error


def supported_instruction_sets() -> list[str]:
    """Those of `INSTRUCTION_SETS` that torch reports for this machine, from most to least."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = list(INSTRUCTION_SETS)
    supported = names[names.index(capability if capability in names else "DEFAULT") :]
    if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported():
        supported.insert(0, "AVX512_BF16")
    return supported


@functools.cache
def cpu_kernels_available() -> bool:
    """Whether `load_cpu_kernels` works; if not, one log line says why."""
    try:
        load_cpu_kernels()
    except KernelBuildError as error:
        logger.warning("the C++ kernels (attention backend 'cpu') are not available: %s", error)
        return False
    return True


def _built(instruction_flags: list[str]) -> Path:
    compiler = next((path for name in _compilers() if (path := shutil.which(name))), None)
    if compiler is None:
        raise KernelBuildError(f"no C++ compiler (looked for {', '.join(_compilers())})")
    flags = _FLAGS + instruction_flags
    sources = sorted(_SOURCES.glob("*.cpp"))
    digest = hashlib.sha256("\0".join([platform.machine(), compiler, *flags]).encode())
    for file in [*sources, *sorted(_SOURCES.glob("*.h"))]:
        digest.update(file.read_bytes())
    target = _cache_dir() / f"cpu-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        # Two workers that start together compile once; the kernel drops the lock if one is killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            logger.info("compiling the CPU kernels (once)")
            _compile(compiler, flags, sources, target)
    return target


def _compilers() -> list[str]:
    chosen = os.environ.get("CXX")
    return [chosen] if chosen else ["g++", "c++", "clang++"]


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "diptych" / "kernels"


def _compile(compiler: str, flags: list[str], sources: list[Path], target: Path) -> None:
    for left_over in target.parent.glob("*.partial-*"):  # by a compilation that was killed
        left_over.unlink()
    partial = target.with_suffix(f".partial-{os.getpid()}")
    command = [compiler, *flags, "-shared", *map(str, sources), "-o", str(partial)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode != 0:
            raise KernelBuildError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        partial.replace(target)
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"{compiler} took more than {_COMPILE_SECONDS} s") from None
    finally:
        partial.unlink(missing_ok=True)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.diptych_call_bytes.restype = ctypes.c_int64
    library.diptych_scratch_floats.restype = ctypes.c_int64
    library.diptych_scratch_floats.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.diptych_attend.restype = None
    library.diptych_attend.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    address, count = ctypes.c_void_p, ctypes.c_int64
    for function, argument_types in (
        (library.diptych_rms_norm, [address] * 3 + [count] * 2 + [ctypes.c_double] + [count] * 2),
        (library.diptych_add_rms_norm, [address] * 4 + [count] * 2 + [ctypes.c_double] + [count] * 2),
        (library.diptych_silu_and_multiply, [address] * 2 + [count] * 4),
        (library.diptych_rotate, [address] * 4 + [count] * 6),
    ):
        function.restype = None
        function.argtypes = argument_types
    return library
