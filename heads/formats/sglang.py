"""SGLang: EAGLE-1/2 (LlamaForCausalLMEagle) and EAGLE-3 (LlamaForCausalLMEagle3), flat.

SGLang drops unknown tensors in silence, always wants an lm_head of draft_vocab_size rows, and replaces the embedding by the target's. It adds
attention's output to the un-normed state only, and has no norm over all taps at once.
"""

from __future__ import annotations

from typing import Any

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, refuse
from draftheads.heads.formats.flat import export_eagle1, export_eagle3, is_eagle1, read_eagle1, read_eagle3
from draftheads.recipes.schema import Geometry, RecipeError

TAKES = ("eagle", "eagle3")


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    command = "python -m sglang.launch_server --model-path TARGET --speculative-draft-model-path THIS_FOLDER --speculative-algorithm "
    if head.config.type == "eagle":
        files = export_eagle1(head, bias=False)
        return Files(files.config, files.tensors, [command + "EAGLE"])
    if head.config.type != "eagle3":
        raise refuse("SGLang", head.config.type, TAKES)
    if len(head.taps) != 3:
        raise RecipeError(f"head.taps has {len(head.taps)} layers; SGLang's fc is three states wide: train with three, or export to vllm")
    files = export_eagle3(head, tables, "SGLang", always_lm_head=True, unknown=("norm_before_residual", "norm_before_fc"))
    notes = [command + "EAGLE3"]
    if head.config.fc_norm or head.config.norm_output:
        notes.append("EAGLE-3.1 (fc_norm, norm_output): SGLang reads both since the middle of 2026; releases before drop them in silence and accept "
                     "far less: compare its accept length with the report's tau.")
    return Files(files.config, files.tensors, notes)


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    return read_eagle1(raw, geometry, ours, bias=False) if is_eagle1(raw) else read_eagle3(raw, geometry, ours)
