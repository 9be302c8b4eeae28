"""The accelerate command that trains a recipe."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from draftheads.recipes.schema import RecipeError


def training_command(recipe: Path, overrides: Sequence[str], processes: int, *, cuda: bool) -> list[str]:
    """`accelerate launch train/eagle.py --recipe …`, by this interpreter and with the train/ of this installation."""
    spec = importlib.util.find_spec("draftheads.train.eagle")
    if spec is None or spec.origin is None:
        raise RecipeError("draftheads.train.eagle is not installed: install the package again (pip install -e .)")
    options = ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--quiet"]
    if processes > 1:
        options.append("--multi_gpu")  # on CPUs too: --cpu with several processes silently starts one
    elif not cuda:
        options.append("--cpu")
    if not cuda:  # accelerate would set one thread, whatever the environment says
        wish = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(wish) if wish.isdecimal() and int(wish) else max(1, len(os.sched_getaffinity(0)) // processes)
        options += ["--num_cpu_threads_per_process", str(threads)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, spec.origin, "--recipe", str(recipe)]
    return command + [part for item in overrides for part in ("--set", item)]


def run_launcher(command: Sequence[str]) -> int:
    """The exit code of the script, which leaves it in a file: accelerate's launcher makes 1 of every code but 0. Whatever ends this process (Ctrl-C,
    SIGTERM) ends the training, which keeps its state first; it is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "code"
        launcher = subprocess.Popen(command, env={**os.environ, "DRAFTHEADS_EXIT_CODE": str(note)})
        try:
            code = launcher.wait()
        except BaseException:
            _end(launcher)
            raise
        return int(note.read_text()) if code and note.is_file() else code


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """The launcher passes no signal on: its scripts get theirs from here."""
    try:
        running = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in running:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(running)
