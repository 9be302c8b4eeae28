"""vLLM: EAGLE-1/2, EAGLE-3 and P-EAGLE flat, DFlash, Medusa in vLLM's own names. speculators.py is the other layout that it serves.

EAGLE: fc.bias is dropped in silence. EAGLE-3: `midlayer.` becomes layers.0, tap k is the output of layer k − 1, as ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, medusa, refuse
from draftheads.heads.formats.detect import detect
from draftheads.heads.formats.flat import (
    check_target,
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


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    kind = head.config.type
    if kind == "eagle":
        files = export_eagle1(head)
        no_bias(files.tensors, "this head")
        return Files(files.config, files.tensors, _notes("eagle", 4))
    if kind == "eagle3":
        files = export_eagle3(head, tables, always_lm_head=False)
        return Files(files.config, files.tensors, _notes("eagle3", 4))
    if kind == "medusa":
        files = medusa.export_vllm(head, tables)
        return Files(files.config, files.tensors, _notes("medusa", head.max_depth or 1))
    if kind == "peagle":
        files = export_eagle3(head, tables, always_lm_head=False)
        kept = {k: v for k, v in files.config.items() if k not in ("depths", "cod_ratio")}
        notes = _notes("eagle3", head.max_depth or 1, ', "parallel_drafting": true')
        return Files(kept | {"architectures": ["PeagleLlamaForCausalLM"]}, files.tensors, notes)
    if kind == "dflash":
        files = export_eagle3(head, tables, always_lm_head=False)
        return Files(files.config, files.tensors, _notes("dflash", head.max_depth or 1))
    raise refuse("vLLM", kind, "eagle, eagle3, peagle, dflash and medusa heads")


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    if detect(raw.config, raw.tensors) == "medusa":
        return medusa.read(raw, geometry, ours)
    if "dflash_config" in raw.config:
        return _read_dflash(raw, geometry, ours)
    if is_eagle1(raw):
        if ours:
            no_bias(raw.tensors, raw.where)
        return read_eagle1(raw, geometry, ours)
    if "mask_hidden" not in raw.tensors:
        return read_eagle3(raw, geometry, ours)
    found = read_eagle3(raw, geometry, ours, "peagle")
    c = raw.config
    token = next((c[k] for k in ("pard_token", "mask_token_id", "ptd_token_id") if c.get(k) is not None), None)
    if token is None:
        raise RecipeError(f"{raw.where}: config.json has none of pard_token, mask_token_id, ptd_token_id: P-EAGLE feeds that token at later depths")
    return replace(found, section={**found.section, "mask_token_id": token, "num_layers": c.get("num_hidden_layers", 1)})


def _read_dflash(raw: Raw, geometry: Geometry, ours: bool) -> Found:
    """Qwen3-style layers, a block of masks; target_layer_ids count layer outputs, one less than our taps."""
    c, where, V = raw.config, raw.where, geometry.vocab_size
    facts: list[str] = []
    inner = c["dflash_config"] or {}
    outputs, token, block = inner.get("target_layer_ids"), inner.get("mask_token_id"), c.get("block_size")
    if not outputs or token is None or block is None:
        raise RecipeError(f"{where}: config.json must have dflash_config.target_layer_ids, dflash_config.mask_token_id and block_size")
    if ours:
        require(raw, {"rope_theta": "old transformers take 10000", "rope_parameters": "transformers 5 takes theta 10000",
                      "draft_vocab_size": "write the number of rows of lm_head", "tie_word_embeddings": "write false", "head_dim": "write it",
                      "num_hidden_layers": "write it"})
    check_target(raw, geometry)
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
    section = {"type": "dflash", "taps": taps, "draft_vocab_size": U, "freeze_lm_head": "lm_head.weight" not in weights, "block_size": block,
               "mask_token_id": token, "num_layers": c.get("num_hidden_layers", 1), **layer_sizes(c, geometry)}
    return Found(section, weights, ids_U, own_values(raw, geometry, facts), facts)


def _notes(method: str, most: int, more: str = "") -> list[str]:
    words = f'{{"method": "{method}", "model": "THIS_FOLDER", "num_speculative_tokens": {most}{more}}}'
    warning = " More than the head has heads would leave vLLM with random ones." if method == "medusa" else ""
    return [f"vllm serve TARGET --speculative-config '{words}'.{warning}"]
