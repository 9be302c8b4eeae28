"""Where the target and its states go, from a plan's numbers: states stored or computed anew in training, the target whole on every device or spread.

    disk that the states need | disk that is free       ─► data.features capture (fp16, or a byte a channel) or online
    memory that training needs | memory of a device     ─► replicate, shard, or how many devices it would take
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from draftheads.data.features import bytes_per_token
from draftheads.recipes.schema import Geometry, Recipe

# Of a device's memory and of a disk's free space: the rest is fragments, the allocator's and other people's.
USABLE = 0.9
DISK_GB_S = 1.0  # what a training process reads from a disk that others read too
GIB = 2**30


def place(recipe: Recipe, geometry: Geometry, made: dict[str, Any], taps: int, *, devices: int, memory_gib: float | None) -> dict[str, Any]:
    """{"states": {"choice", "why"}, "target": {"choice", "why"}}. made: make_plan's. memory_gib: of one device; None: the target's place is open."""
    states = _states(recipe, geometry, made, taps)
    return {"states": states, "target": _target(recipe, made, states["choice"] == "online", devices, memory_gib)}


def _states(recipe: Recipe, g: Geometry, made: dict[str, Any], taps: int) -> dict[str, str]:
    if recipe.data.rows is not None:
        return {"choice": "those of data.rows", "why": "another run's rows are used as they are"}
    if recipe.data.servers is not None:
        return {"choice": "online", "why": "servers return no states"}
    free, tokens = free_gib(recipe.run_dir), made["tokens"]["all"]
    sizes = {kind: tokens * bytes_per_token(taps, g.hidden_size, kind) / GIB for kind in ("fp16", "fp8")}
    passes = made["tokens"]["trained"] / max(tokens, 1)
    forward = 2 * made["parameters"]["target"] / (made["assumptions"]["tflops_per_device"] * 1e12)
    reading = bytes_per_token(taps, g.hidden_size) / (DISK_GB_S * 1e9)
    again = f"they are there after distilling, and {passes:.1f} passes would compute them again at {forward * 1e6:.0f} µs a token"
    if sizes["fp16"] <= USABLE * free:
        if forward < reading / 4:
            return {"choice": "online", "why": f"a forward takes {forward * 1e6:.0f} µs a token, reading its states {reading * 1e6:.0f} µs"}
        return {"choice": "capture", "why": f"{sizes['fp16']:.2f} GiB of {free:.0f} GiB free; {again}"}
    if sizes["fp8"] <= USABLE * free:
        why = f"{sizes['fp8']:.0f} GiB of {free:.0f} GiB free (fp16 would need {sizes['fp16']:.0f}); {again}"
        return {"choice": "capture, data.states: fp8", "why": why}
    return {"choice": "online", "why": f"even in a byte a channel they need {sizes['fp8']:,.0f} GiB, {free:,.0f} GiB are free"}


def _target(recipe: Recipe, made: dict[str, Any], online: bool, devices: int, memory_gib: float | None) -> dict[str, str]:
    if memory_gib is None:
        return {"choice": "not judged", "why": "say what a device has: --gpu-memory 80"}
    memory, room = made["memory_gib"], USABLE * memory_gib
    weights, alone = memory["target"], memory["train_alone"]
    needs = {"training": alone + (weights if online or recipe.train.lora is not None else 0.0)}
    if recipe.data.servers is None:
        needs["distilling"] = memory["distill"]
    hardest, most = max(needs.items(), key=lambda item: item[1])
    if most <= room:
        return {"choice": "replicate", "why": f"{hardest} takes {most:.1f} of {memory_gib:g} GiB on each device"}
    rest = most - weights
    spread = rest + weights / devices
    if spread <= room and devices > 1:
        why = f"whole on each device, {hardest} would take {most:.0f} of {memory_gib:g} GiB; spread over {devices}, {spread:.0f}"
        return {"choice": "shard", "why": why}
    wanted = math.ceil(weights / (room - rest)) if rest < room else None
    cure = f"spread over {wanted} devices it would fit" if wanted else "lower data.batch_size, train.micro_batch_tokens or train.loss_chunk"
    return {"choice": "does not fit", "why": f"{hardest} takes {most:.0f} GiB, a device has {memory_gib:g}: {cure}"}


def free_gib(folder: Path) -> float:
    """Of the disk that the folder lies on, or would."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free / GIB
