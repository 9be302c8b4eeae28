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
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from draftheads.recipes.schema import RecipeError

_T = TypeVar("_T")
# What the user can mend: a place that may not be written, a file where a folder should be (or the reverse), a full disk.
FULL = {errno.ENOSPC, errno.EDQUOT}
BLOCKED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP} | FULL
# Less free than this, and a writer that failed without a reason failed for it: writers fill a disk to its last block.
NO_ROOM = 1 << 20
YOUNG_S = 5.0  # what is younger may be between its making and its lock


def blocked(error: Exception) -> str | None:
    """One line for such an error, None for any other."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's, for ~somebody
        return "a path begins with ~ and the name of nobody here: write it out"
    if not isinstance(error, OSError) or error.errno not in BLOCKED or (error.filename is None and error.errno not in FULL):
        return None
    return f"{error.filename or 'a file could not be written'}: {error.strerror}; mend that, or choose another folder"


@contextmanager
def _explained(goal: Path) -> Iterator[None]:
    """A full disk is an OSError that names the goal, whatever the writer made of it: safetensors and torch have errors of their own, and a write
    to an open file names none."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        told = number in FULL or "No space left" in str(error)
        # torch says "iostream error" or "enforce fail at inline_container".
        if told or (isinstance(error, RuntimeError) and shutil.disk_usage(goal.parent).free < NO_ROOM):
            number = number if number in FULL else errno.ENOSPC
            raise OSError(number, os.strerror(number or errno.ENOSPC), str(goal)) from error
        raise


def folder_place(goal: str | os.PathLike[str]) -> Path:
    """The folder that is meant, links followed: so a link to a folder stays one. RecipeError: the working directory, or one above it."""
    place = Path(os.path.realpath(goal))
    if Path(os.path.realpath(os.curdir)).is_relative_to(place):
        raise RecipeError(f"{goal} is the folder that you are in, or one above it, and would be replaced: choose another")
    return place


def _temporary(goal: Path, make: Callable[..., _T], **how: Any) -> _T:
    """tempfile's `make`, beside `goal`."""
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        return make(suffix=".part", dir=goal.parent, **how)
    except FileNotFoundError:  # /proc and the like take no files
        raise RecipeError(f"{goal}: nothing can be written there; choose another folder") from None


@contextmanager
def atomic_path(goal: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `goal`; on success it is fsynced and renamed over `goal`, on an exception it is removed."""
    goal = Path(goal)
    handle, name = _temporary(goal, tempfile.mkstemp, prefix=f".{goal.name}.")
    os.close(handle)
    part = Path(name)
    try:
        with _explained(goal):  # while the part is still on the disk
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
    puts it back by `recover_folder`. What a killed writer left half-written goes first: it may be as large as a model.
    """
    goal = folder_place(goal)
    with _part_of(goal) as part, _explained(goal):
        yield part
        part.chmod(0o755)
        for item in sorted(part.rglob("*")):
            _fsync(item)
        _fsync(part)
        old = _set_aside(goal)
        _remove(old)
        if goal.exists():
            os.replace(goal, old)
        os.replace(part, goal)
        _fsync(goal.parent)
        _remove(old)


@contextmanager
def _part_of(goal: Path) -> Iterator[Path]:
    """A new temporary folder, locked as long as its writer lives, and removed at the end; those of dead writers are removed at the start.

    Its name says which machine wrote it: on a shared disk locks may not be seen from elsewhere."""
    prefix = f".{goal.name}.{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}."
    part = Path(_temporary(goal, tempfile.mkdtemp, prefix=prefix))
    mine = _lock_folder(part)
    try:
        for other in goal.parent.iterdir():
            if other.name.startswith(prefix) and other.suffix == ".part" and other != part and time.time() - _born(other) > YOUNG_S:
                lock = _lock_folder(other)
                if lock is not None:
                    _remove(other)
                    os.close(lock)
        yield part
    finally:
        _remove(part)
        if mine is not None:
            os.close(mine)


def _lock_folder(folder: Path) -> int | None:
    """A handle that holds the folder's lock; None where somebody else has it, or the disk knows no such locks."""
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if handle is not None:
            os.close(handle)
        return None
    return handle


def _born(folder: Path) -> float:
    """When something was last put into it; now, if it is gone."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return time.time()


def _remove(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink(missing_ok=True)
    else:
        shutil.rmtree(place, ignore_errors=True)


def existing_folder(goal: str | os.PathLike[str]) -> Path:
    """For readers: `goal`, or the older folder while `goal` is absent between atomic_folder's two renames. Changes nothing."""
    goal = Path(goal)
    old = _set_aside(Path(os.path.realpath(goal)))
    return old if old.exists() and not goal.exists() else goal


def recover_folder(goal: str | os.PathLike[str]) -> None:
    """Undo a kill inside atomic_folder: restore the set-aside folder if the new one never arrived, and remove leftovers.

    Only for who holds the lock of the folder's writers: what looks left over to anybody else may be a writer's work in progress.
    """
    goal = Path(os.path.realpath(goal))
    old = _set_aside(goal)
    if old.exists() and not goal.exists():
        os.replace(old, goal)
    for left in [old, *goal.parent.glob(f".{goal.name}.*.part")] if goal.parent.is_dir() else ():
        _remove(left)


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
