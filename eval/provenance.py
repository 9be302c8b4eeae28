"""What was measured with what, where: enough to run the same evaluation again and to explain a difference."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftheads.eval.subject import parts, tree_text
from draftheads.eval.work import Evaluation
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.recipes.schema import content_hash


def settings_of(work: Evaluation) -> dict[str, Any]:
    """What must be equal for a journal to be continued."""
    return {
        "checkpoint": work.checkpoint.hashes(), "eval": work.section.model_dump(mode="json"), "target": work.target.name,
        "revision": work.target.revision, "template": work.target.template_hash, "device": work.target.device.type,
        "dtype": work.dtype, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "tree": tree_text(work.tree),  # a static tree's file may have changed under the same name
        "prompts": [p.id for p in work.prompts], "prompt_tokens": content_hash([p.ids for p in work.prompts]),
    }


def provenance_of(work: Evaluation, rounds_ran: str, seconds: float) -> dict[str, Any]:
    meta, target = work.checkpoint.meta, work.target
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "versions": versions(), "hardware": hardware(target.device),
        "threads": torch.get_num_threads(), "draft weights": _draft_weights(work), "rounds": rounds_ran,
        "target": {"name": target.name, "revision": target.revision, "template_hash": target.template_hash, "packed": target.packed,
                   "attention of the baseline": "draftheads, folded groups", "attention of transformers": "its default"},
        "checkpoint": {"name": work.checkpoint.name, **work.checkpoint.hashes()},
        "recipe_hash": meta.recipe_hash, "data_hash": meta.data_hash, "seconds": round(seconds, 1),
    }


def _draft_weights(work: Evaluation) -> str:
    heads = [p for d in work.drafters.values() for p in parts(d) if p.name == HeadDrafter.name and isinstance(p, HeadDrafter)]
    return "no head" if not heads else "int8" if heads[0].int8 else work.dtype


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("draftheads", "torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu_name(), "cores": os.cpu_count()}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
