"""Medusa (github.com/FasterDecoding/Medusa): official tensor names in medusa_lm_head.safetensors, with a config that vLLM reads as well.

    official    {h}.{n}.linear.{weight,bias}              {h}.{layers}.weight
    vLLM        blocks.{h}.layers.{l}.{weight,bias}       lm_heads.{h}.weight, or lm_head.weight for all (original_lm_head), token_map
    ours        blocks.{h}.{n}.linear.{weight,bias}       lm_heads.{h}.weight (0 alone where all share the target's)

The official code uses one block's weights for all blocks of a head. vLLM drops the blocks' biases unless medusa_fc_bias says otherwise, and takes
the number of heads from any key with "num" and "heads" in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, refuse, shown
from draftheads.heads.formats.flat import are_ids, check_config, require
from draftheads.heads.vocab import draft_maps
from draftheads.recipes.schema import Geometry, RecipeError

TAKES = ("medusa",)
WEIGHTS = "medusa_lm_head.safetensors"


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    if head.config.type != "medusa":
        raise refuse("medusa", head.config.type, TAKES)
    _exportable(head)
    K, N, weights = head.config.medusa_num_heads, head.config.medusa_num_layers, head.state_dict()
    for h in range(K):
        for n in range(1, N):
            if any(not torch.equal(weights[f"blocks.{h}.{n}.linear.{p}"], weights[f"blocks.{h}.0.linear.{p}"]) for p in ("weight", "bias")):
                raise RecipeError(f"the official Medusa uses one block's weights for all {N} blocks of a head; these differ: export to vllm, or "
                                  "train with head.medusa_num_layers 1")
    if len(head.d2t) != head.geometry.vocab_size:
        raise RecipeError("the official Medusa has no reduced vocabulary: train without head.draft_vocab_size, or with head.freeze_lm_head: true and "
                          "export with --whole-vocabulary")
    tensors: dict[str, Tensor] = {}
    for h in range(K):
        for n in range(N):
            for p in ("weight", "bias"):
                tensors[f"{h}.{n}.linear.{p}"] = weights[f"blocks.{h}.{n}.linear.{p}"]
        tensors[f"{h}.{N}.weight"] = weights.get(f"lm_heads.{h}.weight", head.rows_UD(tables.lm_head_VD)).clone()
    config = head.engine_config() | {"original_lm_head": False, "version": "2"}
    if "/" in meta.target:  # a Hub id: the official code loads the target from there
        config["base_model_name_or_path"] = meta.target
    return Files(config, tensors, ["vLLM reads it (method medusa); the official code reads a pickle only: specdec export --to medusa_pt"])


def export_vllm(head: DraftHead, tables: Tables) -> Files:
    """RecipeError for a reduced vocabulary: vLLM 0.32 makes lm_heads of their own of the whole one, and stops at fewer rows; and for a shared one's
    token_map it stops as well, since it does not count as loaded (seen in the engine)."""
    _exportable(head)
    if len(head.d2t) != head.geometry.vocab_size:
        raise RecipeError("vLLM 0.32 loads no Medusa head over a reduced vocabulary: train without head.draft_vocab_size, or with "
                          "head.freeze_lm_head: true and export with --whole-vocabulary")
    weights = head.state_dict()
    tensors = {re.sub(r"^blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", n): t for n, t in weights.items() if n not in ("d2t", "t2d")}
    rows = [tensors[n] for n in tensors if n.startswith("lm_heads.")] or [head.rows_UD(tables.lm_head_VD)]
    shared = all(torch.equal(t, rows[0]) for t in rows)
    if shared:  # one for all heads: a K-th of the file
        tensors = {n: t for n, t in tensors.items() if not n.startswith("lm_heads.")} | {"lm_head.weight": rows[0]}
    config = {k: v for k, v in head.engine_config().items() if k != "draft_vocab_size"}
    return Files(config | {"original_lm_head": shared}, tensors)


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    c, where, facts = raw.config, raw.where, []
    if ours:
        require(raw, {"medusa_fc_bias": "vLLM then drops the blocks' biases; write true", "hidden_size": "vLLM takes 4096; write the target's",
                      "vocab_size": "vLLM takes 32001; write the target's", "medusa_num_heads": "vLLM takes 5", "medusa_num_layers": "write 1",
                      "model_type": "write medusa"})
        if c["medusa_fc_bias"] is not True:
            raise RecipeError(f"{where}: medusa_fc_bias is {c['medusa_fc_bias']!r}: vLLM drops the blocks' biases; write true")
        twice = [k for k in c if "num" in k and "heads" in k and c[k] != c["medusa_num_heads"]]
        if twice:
            raise RecipeError(f"{where}: config.json has {twice[0]} beside medusa_num_heads: vLLM takes either for the number of heads; remove it")
    check_config(raw, geometry)
    weights = our_names(raw.tensors)
    K, N = numbers(raw, weights, "Medusa", r"blocks\.(\d+)\.(\d+)\.linear\.weight")
    for key, found in (("medusa_num_heads", K), ("medusa_num_layers", N)):
        said = c.get(key, found)
        if said != found and (ours or key.endswith("layers") or said > found):
            raise RecipeError(f"{where}: {key} is {said}, the file holds {found}: an engine would invent or lose heads; write {found}")
        if said != found:  # the uploaded configs of the first Medusa heads say 2, and the official loader takes 5
            facts.append(f"{key} says {said}, the file holds {found}: all were taken")
    for h in range(K):  # the first files have no bias in their config, but all have it in their blocks
        for n in range(N):
            weight = weights.get(f"blocks.{h}.{n}.linear.weight")
            if weight is not None and weight.shape[-1] != geometry.hidden_size:
                raise RecipeError(f"{where}: the heads are for a hidden size of {weight.shape[-1]}, this target's is {geometry.hidden_size}: name "
                                  "the one they were trained for")
            if weight is not None and c.get("medusa_fc_bias") is False:
                weights.setdefault(f"blocks.{h}.{n}.linear.bias", torch.zeros_like(weight[:, 0]))
    ids_U = _vocabulary(where, weights, geometry.vocab_size)
    if "lm_head.weight" in weights:
        shared = weights.pop("lm_head.weight")
        weights |= {f"lm_heads.{h}.weight": shared for h in range(K)}
    U = geometry.vocab_size if ids_U is None else len(ids_U)
    rows = {len(t) for n, t in weights.items() if n.startswith("lm_heads.")}
    if rows != {U}:
        raise RecipeError(f"{where}: lm_heads have {sorted(rows)} rows, the target's vocabulary is {U}: name the target they were trained for")
    if c.get("truncated_vocab_size", U) not in (U, None):
        raise RecipeError(f"{where}: truncated_vocab_size is {c['truncated_vocab_size']}, lm_heads have {U} rows")
    weights["d2t"], weights["t2d"] = draft_maps(torch.arange(U) if ids_U is None else ids_U, geometry.vocab_size)
    section = {"type": "medusa", "taps": ["final"], "medusa_num_heads": K, "medusa_num_layers": N, "freeze_lm_head": False, "draft_vocab_size": U,
               "hidden_size": geometry.hidden_size, "max_positions": c.get("max_position_embeddings")}
    return Found(section, weights, ids_U, {}, facts)


def numbers(raw: Raw, weights: Iterable[str], kind: str, pattern: str) -> tuple[int, int]:
    """-> how many heads there are, and blocks of each, by the names of their weights (ours). RecipeError where one is left out."""
    places = {(int(m[1]), int(m[2])) for name in weights if (m := re.fullmatch(pattern, name))}
    if not places:
        raise RecipeError(f"{raw.where}: no tensors of {kind} heads, found {shown(sorted(raw.tensors))}: give the folder of a {kind} head")
    K, N = max(h for h, _ in places) + 1, max(n for _, n in places) + 1
    if len(places) != K * N:
        raise RecipeError(f"{raw.where}: {kind} heads are numbered up to {K - 1} and their blocks up to {N - 1}, and the file has {len(places)} of "
                          "these blocks: it is damaged or incomplete; copy or download it again")
    return K, N


def our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Official and vLLM's names -> ours; others stay, to be told as unknown."""
    found: dict[str, Tensor] = {}
    heads = [re.sub(r"^medusa_heads?\.", "", n) for n in tensors]
    last = {m[1]: int(m[2]) for n in heads if (m := re.fullmatch(r"(\d+)\.(\d+)\.weight", n))}  # the linear layer behind the blocks
    for name, tensor in zip(heads, tensors.values(), strict=True):
        if m := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
            name = f"blocks.{m[1]}.{m[2]}.linear.{m[3]}"
        elif (m := re.fullmatch(r"(\d+)\.(\d+)\.weight", name)) and last[m[1]] == int(m[2]):
            name = f"lm_heads.{m[1]}.weight"
        elif m := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            name = f"blocks.{m[1]}.{m[2]}.linear.{m[3]}"
        found[name] = tensor
    return found


def target_of(config: dict[str, Any]) -> str | None:
    found = config.get("base_model_name_or_path")
    return found if isinstance(found, str) and found else None


def _vocabulary(where: str, weights: dict[str, Tensor], V: int) -> Tensor | None:
    """token_map (target ids) out of the weights; rows of the lm_heads put in its order."""
    ids_U = weights.pop("token_map", None)
    if ids_U is None:
        return None
    if not are_ids(ids_U):
        raise RecipeError(f"{where}: token_map is {ids_U.dtype}, target ids are int64: get the head as it was trained")
    ids_U = ids_U.long()
    if int(ids_U.min()) < 0 or int(ids_U.max()) >= V or len(ids_U.unique()) != len(ids_U):
        raise RecipeError(f"{where}: token_map must hold distinct target ids in 0 … {V - 1}")
    order_U = ids_U.argsort()
    for name in [n for n in weights if n.startswith("lm_head") and len(weights[n]) == len(ids_U)]:
        weights[name] = weights[name][order_U]
    return ids_U[order_U]


def _exportable(head: DraftHead) -> None:
    if tuple(head.taps) != ("final",):
        raise RecipeError(f"head.taps is {list(head.taps)}; Medusa's engines give a head the target's final state only: train with taps [final]")
