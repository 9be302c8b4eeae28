"""Writing that is never half done: to a temporary name beside the goal, fsync, rename.

Every result is written through here, but for two journals that grow by a line at a time, and whose readers drop a last line that a kill
cut short: train.jsonl (train/trackers.py) and records.jsonl (eval/records.py).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftheads.recipes.schema import RecipeError

# What the user can mend: a place that may not be written, a file where a folder should be (or the reverse), a full disk.
BLOCKED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}


def blocked(error: OSError) -> str | None:
    """One line for such an error, None for any other."""
    if error.errno not in BLOCKED or error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}; mend that, or choose another folder"


@contextmanager
def atomic_path(goal: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `goal`; on success it is fsynced and renamed over `goal`, on an exception it is removed."""
    goal = Path(goal)
    goal.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{goal.name}.", suffix=".part", dir=goal.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        _fsync(part)
        os.replace(part, goal)
        _fsync(goal.parent)
    finally:
        part.unlink(missing_ok=True)


def write_text(goal: str | os.PathLike[str], text: str) -> None:
    with atomic_path(goal) as part:
        part.write_text(text, encoding="utf-8")


def write_json(goal: str | os.PathLike[str], value: Any) -> None:
    write_text(goal, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


@contextmanager
def atomic_folder(goal: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary folder; on success it replaces `goal` (an older one is moved aside first and removed afterwards).

    Between the two renames (and after a kill there) the older folder is `.<name>.old`: readers find it by `existing_folder`, the next writer
    puts it back by `recover_folder`.
    """
    goal = Path(goal)
    goal.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{goal.name}.", suffix=".part", dir=goal.parent))
    try:
        yield part
        part.chmod(0o755)
        for item in sorted(part.rglob("*")):
            _fsync(item)
        _fsync(part)
        old = _set_aside(goal)
        shutil.rmtree(old, ignore_errors=True)
        if goal.exists():
            os.replace(goal, old)
        os.replace(part, goal)
        _fsync(goal.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def existing_folder(goal: str | os.PathLike[str]) -> Path:
    """For readers: `goal`, or the older folder while `goal` is absent between atomic_folder's two renames. Changes nothing."""
    goal = Path(goal)
    old = _set_aside(goal)
    return old if old.exists() and not goal.exists() else goal


def recover_folder(goal: str | os.PathLike[str]) -> None:
    """Undo a kill inside atomic_folder: restore the set-aside folder if the new one never arrived, and remove leftovers.

    Only for who holds the lock of the folder's writers: what looks left over to anybody else may be a writer's work in progress.
    """
    goal = Path(goal)
    old = _set_aside(goal)
    if old.exists() and not goal.exists():
        os.replace(old, goal)
    shutil.rmtree(old, ignore_errors=True)
    for part in goal.parent.glob(f".{goal.name}.*.part") if goal.parent.is_dir() else ():
        shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def _set_aside(goal: Path) -> Path:
    return goal.parent / f".{goal.name}.old"


@contextmanager
def locked(path: Path, doing: str, cure: str) -> Iterator[None]:
    """One process at a time; the lock goes with its process, however that ends. RecipeError "another process (pid 7) is {doing}; wait for it,
    or {cure}" where one is at work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            raise RecipeError(f"another process ({handle.read().strip() or 'pid unknown'}) is {doing}; wait for it, or {cure}") from None
        handle.seek(0)
        handle.truncate()
        handle.write(f"pid {os.getpid()}")
        handle.flush()
        yield


def sha256_file(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
