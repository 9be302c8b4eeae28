"""TensorRT-LLM's PyTorch flow: EAGLE-3, flat. The layers to tap are told to the engine, not read from the folder."""

from __future__ import annotations

from typing import Any

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, refuse
from draftheads.heads.formats.flat import export_eagle3, read_eagle3
from draftheads.recipes.schema import Geometry

TAKES = ("eagle3",)  # Medusa heads go to its legacy flow: medusa_pt


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    if head.config.type != "eagle3":
        raise refuse("TensorRT-LLM", head.config.type, TAKES)
    files = export_eagle3(head, tables, "TensorRT-LLM", always_lm_head=False, unknown=("norm_before_residual",))
    outputs = [k - 1 for k in head.taps if isinstance(k, int)]
    return Files(files.config, files.tensors, [
        f"EagleDecodingConfig(max_draft_len=4, speculative_model_dir=THIS_FOLDER, eagle3_layers_to_capture={{{', '.join(map(str, outputs))}}}): "
        "these are layer outputs, one less than head.taps."])


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    return read_eagle3(raw, geometry, ours)
