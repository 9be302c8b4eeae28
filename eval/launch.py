"""The accelerate command that trains a recipe."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from draftheads.recipes.schema import RecipeError


def training_command(recipe: Path, overrides: Sequence[str], processes: int) -> list[str]:
    """`accelerate launch train/eagle.py --recipe …`, by this interpreter and with the train/ of this installation."""
    spec = importlib.util.find_spec("draftheads.train.eagle")
    if spec is None or spec.origin is None:
        raise RecipeError("draftheads.train.eagle is not installed: install the package again (pip install -e .)")
    # --cpu with --num_processes 2 silently runs one process; --multi_gpu starts them on CPUs too, and the script then picks its device.
    several = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"] if processes > 1 else []
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), *several, spec.origin, "--recipe", str(recipe)]
    return command + [part for item in overrides for part in ("--set", item)]
