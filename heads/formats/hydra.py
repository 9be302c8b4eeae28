"""Hydra (github.com/zankner/Hydra), its `mlp` and `prefix-mlp` heads, to be read: no engine loads them, so nothing is written in this layout.

    mlp           hydra_mlp.{i}.{l}.linear.*, .0.res_connection.*     hydra_lm_head.{i}.{weight,bias}
    prefix-mlp    the same with a Dropout before each module, which moves the numbers: hydra_mlp.{i}.{2l+1}, hydra_lm_head.{i}.1,
                  and prefix_embeding_layer.{layers.0,norm}.* (sic)
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.formats import Found, Raw
from draftheads.heads.formats.flat import check_config
from draftheads.heads.formats.medusa import numbers, target_of
from draftheads.heads.vocab import draft_maps
from draftheads.recipes.schema import Geometry, RecipeError

__all__ = ["read", "target_of"]


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    c, where = raw.config, raw.where
    check_config(raw, geometry)
    arch, offset = c.get("hydra_head_arch", "mlp"), c.get("hidden_state_offset", 0)
    if arch not in ("mlp", "prefix-mlp") or not c.get("grounded_heads", False):
        raise RecipeError(f"{where}: hydra_head_arch is {arch!r} and grounded_heads {c.get('grounded_heads', False)}; only grounded mlp and "
                          "prefix-mlp heads can be read")
    if offset:
        raise RecipeError(f"{where}: hidden_state_offset is {offset}; only heads on the target's last state (0) can be read")
    prefix = arch == "prefix-mlp"
    weights = our_names(raw.tensors, prefix)
    biases = [n for n in weights if re.fullmatch(r"hydra_lm_head\.\d+\.bias", n)]
    biased = any(bool(weights[n].any()) for n in biases)
    if not biased:
        weights = {n: t for n, t in weights.items() if n not in biases}
    K, N = numbers(raw, weights, "Hydra", r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
    for key, found in (("hydra_num_heads", K), ("hydra_num_layers", N)):
        if c.get(key, found) != found:
            raise RecipeError(f"{where}: {key} is {c[key]}, the file holds {found}: the config contradicts the tensors")
    V = geometry.vocab_size
    weights["d2t"], weights["t2d"] = draft_maps(torch.arange(V), V)
    section: dict[str, Any] = {"type": "hydra", "taps": ["final"], "hydra_num_heads": K, "hydra_num_layers": N, "prefix_layer": prefix,
                               "freeze_lm_head": False, "lm_head_bias": biased, "hidden_size": geometry.hidden_size}
    return Found(section, weights)


def our_names(tensors: dict[str, Tensor], prefix: bool) -> dict[str, Tensor]:
    """The official names -> ours; others stay, to be told as unknown. The prefix layer's embedding table is never read."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if prefix:
            if m := re.fullmatch(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)", name):
                name = f"hydra_mlp.{m[1]}.{(int(m[2]) - 1) // 2}.{m[3]}"
            elif m := re.fullmatch(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)", name):
                name = f"hydra_lm_head.{m[1]}.{m[2]}"
            name = name.replace("prefix_embeding_layer.layers.0.", "prefix_layer.").replace("prefix_embeding_layer.norm.", "prefix_norm.")
            if name == "prefix_embeding_layer.embed_tokens.weight" or name.endswith("rotary_emb.inv_freq"):
                continue
        found[name] = tensor
    return found
