"""vLLM: EAGLE-1/2, EAGLE-3 and P-EAGLE flat, DFlash, DSpark, Medusa in vLLM's own names. speculators.py is the other layout that it serves.

EAGLE: fc.bias is dropped in silence. EAGLE-3: `midlayer.` becomes layers.0, tap k is the output of layer k − 1, as ours. P-EAGLE goes by EAGLE-3's
architecture: vLLM puts "Eagle3" before any other name in a flat folder, and then knows none of it. DSpark is for vLLM's second model runner, which
needs a GPU. Read in vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, medusa, refuse
from draftheads.heads.formats.detect import detect
from draftheads.heads.formats.flat import (
    check_config,
    draft_ids,
    export_eagle1,
    export_eagle3,
    is_eagle1,
    layer_sizes,
    no_bias,
    own_values,
    read_eagle1,
    read_eagle3,
    require,
)
from draftheads.recipes.schema import Geometry, RecipeError

TAKES = ("eagle", "eagle3", "peagle", "dflash", "dspark", "medusa")
_WARNINGS = {
    "medusa": "More tokens than the head has heads would leave vLLM with random ones.",
    "dflash": "No other number of tokens: the head was trained on blocks of one length. vLLM 0.32 on a CPU reads heads of several layers "
              "otherwise, and accepts less.",
    "dspark": "No other number of tokens: the head was trained on blocks of one length. It needs vLLM's model runner V2, hence a GPU.",
}


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    kind = head.config.type
    if kind == "eagle":
        files = export_eagle1(head, bias=False)
        no_bias(files.tensors, "this head")
        return Files(files.config, files.tensors, _notes("eagle", 4))
    if kind == "eagle3":
        files = export_eagle3(head, tables, "vLLM", always_lm_head=False, unknown=("fc_bias",))
        return Files(files.config, files.tensors, _notes("eagle3", 4))
    if kind == "medusa":
        files = medusa.export_vllm(head, tables)
        return Files(files.config, files.tensors, _notes("medusa", head.max_depth or 1))
    if kind == "peagle":
        files = export_eagle3(head, tables, "vLLM", always_lm_head=False, unknown=("fc_bias",))
        kept = {k: v for k, v in files.config.items() if k not in ("depths", "cod_ratio")}
        notes = _notes("eagle3", head.max_depth or 1, ', "parallel_drafting": true')
        if head.config.fc_norm or head.config.norm_before_fc:
            notes.append("On a GPU without --enforce-eager, whose kernel for norms does not take the single vector that mask_hidden is.")
        return Files(kept, files.tensors, notes)
    if kind in ("dflash", "dspark"):
        files = export_eagle3(head, tables, "vLLM", always_lm_head=False)
        return Files(files.config, files.tensors, _notes(kind, head.max_depth or 1))
    raise refuse("vLLM", kind, TAKES)


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    if detect(raw.config, raw.tensors) == "medusa":
        return medusa.read(raw, geometry, ours)
    if "dflash_config" in raw.config or "markov_rank" in raw.config:
        return _read_block(raw, geometry, ours)
    if is_eagle1(raw):
        if ours:
            no_bias(raw.tensors, raw.where)
        return read_eagle1(raw, geometry, ours, bias=False)
    if "mask_hidden" not in raw.tensors:
        return read_eagle3(raw, geometry, ours)
    found = read_eagle3(raw, geometry, ours, "peagle")
    c = raw.config
    token = next((c[k] for k in ("pard_token", "mask_token_id", "ptd_token_id") if c.get(k) is not None), None)
    if token is None:
        raise RecipeError(f"{raw.where}: config.json has none of pard_token, mask_token_id, ptd_token_id: P-EAGLE feeds that token at later depths")
    return replace(found, section={**found.section, "mask_token_id": token, "num_layers": c.get("num_hidden_layers", 1)})


def _read_block(raw: Raw, geometry: Geometry, ours: bool) -> Found:
    """DFlash and DSpark: Qwen3-style layers, a block of masks; target_layer_ids count layer outputs, one less than our taps. DSpark's keys may stand
    in dflash_config, which goes first, or at the top."""
    c, where, V = raw.config, raw.where, geometry.vocab_size
    facts: list[str] = []
    check_config(raw, geometry)
    kind = "dspark" if {**c, **(c.get("dflash_config") or {})}.get("markov_rank") else "dflash"
    inner = {**(c if kind == "dspark" else {}), **(c.get("dflash_config") or {})}
    outputs, token, block = inner.get("target_layer_ids"), inner.get("mask_token_id"), c.get("block_size")
    if not outputs or token is None or block is None:
        raise RecipeError(f"{where}: config.json must have dflash_config.target_layer_ids, dflash_config.mask_token_id and block_size")
    anchored = bool(inner.get("sample_from_anchor", kind == "dspark")) and not c.get("dspark_bonus_anchor")
    if anchored != (kind == "dspark") or inner.get("causal") or c.get("markov_head_type", "vanilla") != "vanilla":
        raise RecipeError(f"{where}: only {kind} heads with attention both ways, whose anchor drafts {'a' if kind == 'dspark' else 'no'} token, and "
                          f"with a vanilla Markov head can be read; found causal {inner.get('causal')}, sample_from_anchor "
                          f"{inner.get('sample_from_anchor')}, dspark_bonus_anchor {c.get('dspark_bonus_anchor')}, markov_head_type "
                          f"{c.get('markov_head_type')}")
    if ours:
        require(raw, {"rope_theta": "old transformers take 10000", "rope_parameters": "transformers 5 takes theta 10000",
                      "draft_vocab_size": "write the number of rows of lm_head", "tie_word_embeddings": "write false", "head_dim": "write it",
                      "num_hidden_layers": "write it"})
    odd = set(c.get("layer_types") or ()) - {"full_attention"}
    if odd or c.get("tie_word_embeddings") or c.get("attention_bias"):
        raise RecipeError(f"{where}: only full attention without biases and untied heads can be read, found layer_types {sorted(odd)}, "
                          f"tie_word_embeddings {c.get('tie_word_embeddings')}, attention_bias {c.get('attention_bias')}")
    weights = {n: t for n, t in raw.tensors.items() if n != "embed_tokens.weight"}
    U = c.get("draft_vocab_size") or (V if "d2t" not in weights else len(weights["d2t"]))
    ids_U, weights = draft_ids(where, weights, U, V, ours)
    taps = [k + 1 for k in outputs]
    if taps != sorted(set(taps)) or not all(0 <= k < geometry.num_layers for k in taps):
        raise RecipeError(f"{where}: target_layer_ids {outputs} must be distinct, rising and in 0 … {geometry.num_layers - 2} for this target")
    section = {"type": kind, "taps": taps, "draft_vocab_size": U, "freeze_lm_head": "lm_head.weight" not in weights, "block_size": block,
               "mask_token_id": token, "num_layers": c.get("num_hidden_layers", 1), **layer_sizes(raw, geometry)}
    if kind == "dspark":
        rank = section["markov_rank"] = inner["markov_rank"]
        if not ours and not any(n.startswith("confidence_head.") for n in weights):
            facts.append("it has no confidence head: one of zeros was added")
            weights |= {"confidence_head.proj.weight": torch.zeros(1, geometry.hidden_size + rank), "confidence_head.proj.bias": torch.zeros(1)}
    return Found(section, weights, ids_U, own_values(raw, geometry, facts), facts)


def _notes(method: str, most: int, more: str = "") -> list[str]:
    words = f'{{"method": "{method}", "model": "THIS_FOLDER", "num_speculative_tokens": {most}{more}}}'
    return [f"vllm serve TARGET --speculative-config '{words}'", *([_WARNINGS[method]] if method in _WARNINGS else [])]
