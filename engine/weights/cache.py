"""A directory that is built once: atomically, by one process at a time, whatever is killed meanwhile."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.engine.models.errors import ModelSourceError

Report = Callable[[str], None]
"""Takes one line of progress for a person."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/diptych`, by default `~/.cache/diptych`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "diptych"


def build_once(target: Path, build: Callable[[Path], None], report: Report) -> Path:
    """Returns `target`, a directory that exists completely or not at all.

    `build` fills an empty directory beside it, which is renamed when it returns. A process that finds another
    one building waits for it. What a killed process left is removed by the next one that builds.
    Raises `ModelSourceError` if the file system refuses.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", report):
            if target.is_dir():
                return target
            prefix = f".{target.name}.partial-"
            for left_over in target.parent.glob(f"{prefix}*"):
                shutil.rmtree(left_over)
            partial = target.parent / f"{prefix}{os.getpid()}"
            partial.mkdir()
            try:
                build(partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelSourceError(f"can't build the converted model in {target}: {error}") from error
    return target


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """An exclusive lock that the kernel drops when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is converting this model: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
