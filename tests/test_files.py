"""recipes/files.py: whole or not at all, links, full disks, what killed writers leave."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftheads.eval import cli
from draftheads.recipes import files
from draftheads.recipes.files import atomic_folder, atomic_path, blocked, existing_folder, folder_place, recover_folder
from draftheads.recipes.schema import RecipeError


def write(goal: Path, text: str = "x") -> None:
    with atomic_folder(goal) as part:
        (part / "f").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_to_a_folder_stays_one(tmp_path, dangling):
    real, link = tmp_path / "real", tmp_path / "links" / "l"
    link.parent.mkdir()
    link.symlink_to(real)
    if not dangling:
        write(real, "old")
    for text in ("1", "2"):
        write(link, text)
        assert link.is_symlink() and (real / "f").read_text() == text
    assert (names(tmp_path), names(link.parent)) == (["links", "real"], ["l"])
    os.replace(real, tmp_path / ".real.old")  # a kill between the two renames
    assert existing_folder(link) == tmp_path / ".real.old"
    recover_folder(link)
    assert (link / "f").read_text() == "2"


def test_a_link_that_was_set_aside_is_no_obstacle(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.old").symlink_to(tmp_path / "elsewhere")
    for text in ("1", "2"):
        write(tmp_path / "out", text)
    assert names(tmp_path) == ["elsewhere", "out"]


@pytest.mark.parametrize("place", [".", "..", "x/..", "link"])
def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch, place):
    here = tmp_path / "here"
    (here / "x").mkdir(parents=True)
    (here / "link").symlink_to(here)
    monkeypatch.chdir(here)
    for attempt in (folder_place, write):
        with pytest.raises(RecipeError, match="the folder that you are in, or one above it"):
            attempt(Path(place))
    assert names(tmp_path) == ["here"]


def test_places_that_take_no_files(monkeypatch):
    for attempt in (write, lambda goal: files.write_text(goal, "x")):
        with pytest.raises(RecipeError, match="/proc/x: nothing can be written there"):
            attempt(Path("/proc/x"))
    with pytest.raises(RuntimeError) as error:
        Path("~nobody-here/y").expanduser()
    assert "begins with ~" in blocked(error.value)


class Serializing(Exception):
    """As safetensors has one, of no base that we know."""


@pytest.mark.parametrize("writer", [atomic_folder, atomic_path])
@pytest.mark.parametrize(("error", "free"), [
    (OSError(errno.ENOSPC, "No space left on device"), 1 << 40), (OSError(errno.EDQUOT, "Disk quota exceeded"), 1 << 40),
    (Serializing("I/O error: No space left on device (os error 28)"), 1 << 40), (RuntimeError("basic_ios::clear: iostream error"), 0),
], ids=str)
def test_a_full_disk_names_the_goal_whatever_the_writer_says(tmp_path, monkeypatch, writer, error, free):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(OSError) as found, writer(tmp_path / "goal"):
        raise error
    line = blocked(found.value)
    assert line is not None and line.startswith(f"{tmp_path / 'goal'}: ") and line.endswith("; mend that, or choose another folder")
    assert found.value.__cause__ is error and not names(tmp_path)


def test_other_faults_stay_what_they_are(tmp_path):
    for error in (RuntimeError("a fault of ours"), ValueError("x"), OSError(errno.EIO, "Input/output error")):
        with pytest.raises(type(error)) as found, atomic_folder(tmp_path / "goal"):
            raise error
        assert found.value is error and blocked(error) is None
    assert "could not be written: No space left" in blocked(OSError(errno.ENOSPC, "No space left on device")), "of a file that is open already"


WRITER = """
import sys, time
from pathlib import Path
from draftheads.eval import cli
from draftheads.recipes.files import atomic_folder
def write():
    with atomic_folder(sys.argv[1]) as part:
        (part / "big").write_text("half")
        print("writing", flush=True)
        time.sleep(60)
sys.exit(cli.guard("specdec", write))
"""


def start(goal: Path) -> subprocess.Popen:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(goal)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "writing\n"
    return writer


def test_what_a_killed_writer_left_goes_and_a_living_ones_stays(tmp_path, monkeypatch):
    goal = tmp_path / "out"
    (tmp_path / ".out.of-somebody.part").mkdir()
    writer = start(goal)
    later = time.time() + 60
    monkeypatch.setattr(files.time, "time", lambda: later)
    write(goal)
    assert len(parts := [n for n in names(tmp_path) if n.endswith(".part")]) == 2, "the writer lives"
    writer.kill()
    writer.wait()
    assert [n for n in names(tmp_path) if n.endswith(".part")] == parts, "nobody could clean up"
    write(goal)
    assert names(tmp_path) == [".out.of-somebody.part", "out"]


def test_a_mutant_without_the_lock_takes_a_living_writers_work(tmp_path, monkeypatch):
    goal = tmp_path / "out"
    later = time.time() + 60
    with monkeypatch.context() as patch:
        patch.setattr(files.fcntl, "flock", lambda *_: None)
        with atomic_folder(goal) as part:
            patch.setattr(files.time, "time", lambda: later)
            write(tmp_path / "out")
            assert not part.exists()
            part.mkdir()


def test_sigterm_leaves_nothing_half_written(tmp_path):
    writer = start(tmp_path / "out")
    writer.send_signal(signal.SIGTERM)
    _, said = writer.communicate(timeout=20)
    assert writer.returncode == 143 and not names(tmp_path) and "Traceback" not in said
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # training in this process may have left its own
    try:
        assert cli.guard("specdec", lambda: 0) == 0 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
