"""Which layout a folder has, from its config and the names of its tensors. Imports no torch: the command line asks before the long imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
INDEX = "model.safetensors.index.json"
_MEDUSA = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.(linear\.)?weight|blocks\.\d+\.layers\.\d+\.weight")


def detect(config: dict[str, Any], names: Iterable[str]) -> str | None:
    """The name of a layout, None: no draft head that is known here."""
    names = set(names)
    if config.get("speculators_model_type"):
        return "speculators"
    if any(k.startswith("hydra_") for k in config) or any(n.startswith(("hydra_mlp.", "hydra_lm_head.")) for n in names):
        return "hydra"
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config or any(_MEDUSA.fullmatch(n) for n in names):
        return "medusa"
    if "mask_hidden" in names or "dflash_config" in config or "markov_rank" in config:
        return "vllm"
    if {"fc.weight", "model.fc.weight"} & names or "draft_vocab_size" in config or "eagle_config" in config:
        return "eagle"
    named = any("eagle" in str(a).lower() for a in config.get("architectures") or ())
    return "eagle" if named and config.get("num_hidden_layers") == 1 else None  # a whole model may be called Eagle


def is_head_folder(folder: Path) -> bool:
    """Whether a folder without draftheads.json holds a draft head of another tool, rather than a model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and detect(config, tensor_names(folder)) is not None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # no JSON, or JSON of another shape
        return False


def tensor_names(folder: Path) -> list[str]:
    """From the headers of the safetensors files, or their index; [] where there are only pickles."""
    if (folder / INDEX).is_file():
        return list(json.loads((folder / INDEX).read_text(encoding="utf-8")).get("weight_map", {}))
    for name in SAFETENSORS:
        if (folder / name).is_file():
            with (folder / name).open("rb") as handle:
                size = int.from_bytes(handle.read(8), "little")
                return [k for k in json.loads(handle.read(min(size, 1 << 26))) if k != "__metadata__"]
    return []
