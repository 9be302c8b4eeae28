"""The official code of EAGLE-1, 2 and 3 (github.com/SafeAILab/EAGLE); what `import --from auto` takes for any flat EAGLE folder.

The official EAGLE-3 code knows neither tap keys nor the two norms of 3.1, so that a head must have the taps 2, L//2, L-3 and fc_norm and
norm_output off. EAGLE-2 is EAGLE-1 with another tree.
"""

from __future__ import annotations

from typing import Any

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, refuse
from draftheads.heads.formats.flat import export_eagle1, export_eagle3, is_eagle1, read_eagle1, read_eagle3
from draftheads.recipes.schema import Geometry, RecipeError

TAKES = ("eagle", "eagle3")
SHARDS = ("Its loader reads model.safetensors.index.json: a target in one file has to be saved in shards first, "
          "model.save_pretrained(TARGET, max_shard_size='1GB')")


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    if head.config.type == "eagle":
        files = export_eagle1(head, bias=True)
        # The official class pads by it, and Llama configs from the Hub have none.
        return Files(files.config | {"pad_token_id": 0}, files.tensors, [
            "EaModel.from_pretrained(base_model_path=TARGET, ea_model_path=THIS_FOLDER, use_eagle3=False)", SHARDS])
    if head.config.type != "eagle3":
        raise refuse("eagle", head.config.type, TAKES)
    L = head.geometry.num_layers
    if head.config.fc_norm or head.config.norm_output:
        raise RecipeError("the official EAGLE-3 code knows no fc_norm and no norm_output (EAGLE-3.1): train with both false, or export to vllm")
    if list(head.taps) != [2, L // 2, L - 3]:
        raise RecipeError(f"the official EAGLE-3 code taps {[2, L // 2, L - 3]} and can be told no other: the head has {list(head.taps)}; "
                          "export to vllm or sglang")
    files = export_eagle3(head, tables, "the official EAGLE-3 code", always_lm_head=True,
                          unknown=("norm_before_residual", "norm_before_fc", "fc_bias"))
    return Files(files.config | {"pad_token_id": 0}, files.tensors,
                 ["EaModel.from_pretrained(base_model_path=TARGET, ea_model_path=THIS_FOLDER, use_eagle3=True)", SHARDS])


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    return read_eagle1(raw, geometry, ours) if is_eagle1(raw) else read_eagle3(raw, geometry, ours)
