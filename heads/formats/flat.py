"""What the flat layouts share: EAGLE-1 and EAGLE-3 as official code, vLLM, SGLang and TensorRT-LLM read them, and the checks of both.

One EAGLE-3 folder serves them all (`midlayer.*`, d2t as offsets, both keys of the tap numbers), and so does one EAGLE-1 folder, but for the official
code (an fc.bias of zeros: vLLM ignores it, SGLang would leave a missing one random). Each check below is of something that at least one engine takes
in silence. A whole vocabulary has no d2t and t2d: vLLM, which makes no place for them then, stops.

Tap numbers: `eagle_aux_hidden_state_layer_ids` at the top counts like ours (vLLM), in `eagle_config` it counts layer outputs, one less (SGLang).

Shape suffixes: V target vocabulary, U draft vocabulary, H hidden.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, shown
from draftheads.heads.layers import rope_parameters
from draftheads.heads.vocab import draft_maps
from draftheads.recipes.schema import Geometry, RecipeError

# Keys of ours, that no engine knows.
PRIVATE = ("freeze_lm_head", "induction_init")
AUX = "eagle_aux_hidden_state_layer_ids"
EAGLE1_NAMES = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
_CURES = {
    "architectures": "engines choose the model by it", "hidden_size": "engines take 4096", "vocab_size": "engines take 32000",
    "num_attention_heads": "engines take 32", "num_key_value_heads": "engines take as many as query heads",
    "intermediate_size": "engines take 11008", "rms_norm_eps": "engines take 1e-6", "max_position_embeddings": "engines take 2048",
    "rope_theta": "old transformers take 10000", "rope_parameters": "transformers 5 takes theta 10000", "torch_dtype": "engines guess",
    "tie_word_embeddings": "SGLang stops; write false", "head_dim": "engines take hidden_size / heads",
}
_CURES3 = _CURES | {
    "draft_vocab_size": "SGLang stops; write the number of rows of lm_head",
    "norm_before_residual": "vLLM takes true in speculators configs, false in flat ones; write what it was trained with",
    "attention_bias": "TensorRT-LLM wants it; write false", AUX: "engines take layers 2, L//2, L-3; write the taps",
}

_KNOWN_BY = {"norm_before_residual": "vllm, speculators", "norm_before_fc": "vllm, speculators, trtllm", "fc_bias": "sglang, trtllm"}

# Of any config, at the top or in one of its parts. A flag is true or false: any other string or number would count as true.
_PARTS = ("eagle_config", "dflash_config", "rope_parameters", "rope_scaling")
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "bias", "fc_norm", "norm_output", "norm_before_residual", "norm_before_fc",
          "medusa_fc_bias", "grounded_heads", "sample_from_anchor", "dspark_bonus_anchor", "causal")
_NUMBERS = {"rms_norm_eps": 1.0, "rope_theta": 1e15, "max_position_embeddings": 2**31 - 1, "num_hidden_layers": 1000}  # the most that makes sense
_WHOLE = ("max_position_embeddings", "num_hidden_layers")


# ---- EAGLE-3

def export_eagle3(head: DraftHead, tables: Tables, engine: str, *, always_lm_head: bool, unknown: tuple[str, ...] = ()) -> Files:
    """always_lm_head: the engine does not take the target's when there is none here. unknown: fields of the head that it leaves out in silence."""
    for field in unknown:
        if getattr(head.config, field, False):
            raise RecipeError(f"head.{field} is true, and {engine} knows no such thing: the head would draft otherwise than it was trained; train "
                              f"with false, or export to one that does ({_KNOWN_BY[field]})")
    if "final" in head.taps:
        raise RecipeError(f"head.taps {list(head.taps)}: engines tap layers only, not the final norm's output; train with taps that are numbers")
    config = {k: v for k, v in head.engine_config().items() if k not in PRIVATE}
    whole = len(head.d2t) == head.geometry.vocab_size
    weights = {n: t for n, t in head.state_dict().items() if not (whole and n in ("d2t", "t2d"))}
    if "lm_head.weight" not in weights and (always_lm_head or not whole):
        weights["lm_head.weight"] = head.rows_UD(tables.lm_head_VD)
    return Files(config, weights)


def read_eagle3(raw: Raw, geometry: Geometry, ours: bool, type: str = "eagle3", facts: list[str] | None = None) -> Found:
    c, where, facts = raw.config, raw.where, list(facts or ())
    if ours:
        require(raw, _CURES3)
    check_config(raw, geometry)
    if "target_hidden_size" in c and c["target_hidden_size"] is None:
        raise RecipeError(f"{where}: config.json has target_hidden_size: null: vLLM multiplies by it and stops; leave it out or write the number")
    if c.get("target_hidden_size", geometry.hidden_size) != geometry.hidden_size:
        raise RecipeError(f"{where}: target_hidden_size is {c['target_hidden_size']}, the target's is {geometry.hidden_size}")
    nested = c.get("eagle_config") or {}
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if c.get(key) or nested.get(key):
            raise RecipeError(f"{where}: {key} is true, our EAGLE-3 head has no such thing; only heads with false can be read")
    weights = renamed(raw.tensors, {"layers.0.": "midlayer."})
    if weights.pop("embed_tokens.weight", None) is not None:
        facts.append("its embedding was left out: the target's is used, as in the engines")
    V, U = geometry.vocab_size, c.get("draft_vocab_size", geometry.vocab_size if "d2t" not in weights else len(weights["d2t"]))
    if U is None:
        if ours:
            raise RecipeError(f"{where}: draft_vocab_size is null: write {V}, or the number of rows of lm_head")
        U = V
    ids_U, weights = draft_ids(where, weights, U, V, ours)
    if U != V and "lm_head.weight" not in weights:
        raise RecipeError(f"{where}: lm_head.weight is missing and the draft vocabulary is {U} of {V}: engines cannot take the target's; "
                          "export the head again")
    taps = tap_numbers(raw, geometry.num_layers, ours, facts)
    layers = c.get("num_hidden_layers", 1)
    if type == "eagle3" and layers != 1:
        raise RecipeError(f"{where}: num_hidden_layers is {layers}, an EAGLE-3 head has 1 (was the target's count copied?): write 1")
    section = {
        "type": type, "taps": taps, "draft_vocab_size": U, "freeze_lm_head": "lm_head.weight" not in weights, "fc_norm": bool(c.get("fc_norm")),
        "norm_output": bool(c.get("norm_output")), **_forms(raw, weights, facts), **layer_sizes(raw, geometry),
    }
    if type == "eagle3":
        section["induction_init"] = False
    return Found(section, weights, ids_U, own_values(raw, geometry, facts), facts)


def _forms(raw: Raw, weights: dict[str, Tensor], facts: list[str]) -> dict[str, bool]:
    """The options of a head that the official code doesn't have; zeros of an fc.bias are left out of the weights."""
    c, nested, where = raw.config, raw.config.get("eagle_config") or {}, raw.where
    found: dict[str, bool] = {}
    for key in ("norm_before_residual", "norm_before_fc"):
        said = {bool(place[key]) for place in (c, nested) if place.get(key) is not None}
        if len(said) > 1:
            raise RecipeError(f"{where}: {key} is {c[key]} and eagle_config.{key} is {nested[key]}: engines read one or the other; make them agree")
        found[key] = said.pop() if said else False
    if found["norm_before_residual"]:
        facts.append("norm_before_residual is true: SGLang, TensorRT-LLM and the official code would draft otherwise with it")
    if c.get("bias") and "fc.bias" not in weights:
        raise RecipeError(f"{where}: bias is true and fc.bias is missing: SGLang would leave it random; write false, or get the tensor")
    if "fc.bias" in weights and c.get("bias") is False and bool(weights["fc.bias"].any()):
        raise RecipeError(f"{where}: bias is false and fc.bias is not zero: engines drop it in silence; write true")
    if "fc.bias" in weights and not bool(weights["fc.bias"].any()):
        del weights["fc.bias"]
    return {**found, "fc_bias": "fc.bias" in weights}


def tap_numbers(raw: Raw, layers: int, ours: bool, facts: list[str]) -> list[int]:
    """Our tap numbers: vLLM's key, else SGLang's (one less), else the default that all share. RecipeError where they disagree."""
    top, nested = raw.config.get(AUX), (raw.config.get("eagle_config") or {}).get(AUX)
    if ours and nested is None and "transformer_layer_config" not in raw.config:
        raise RecipeError(f"{raw.where}: config.json has no eagle_config.{AUX}: SGLang takes layers 2, L//2, L-3; write the taps minus 1 there")
    if top is not None and nested is not None and list(top) != [k + 1 for k in nested]:
        raise RecipeError(f"{raw.where}: {AUX} is {top} and eagle_config.{AUX} is {nested}; the second counts layer outputs and must be one less")
    if top is None and nested is None:
        facts.append("it names no layers: 2, L//2, L-3 were assumed")
        top = [2, layers // 2, layers - 3]
    elif top is None:
        facts.append(f"eagle_config.{AUX} {nested} was read as layer outputs (SGLang, ModelOpt); vLLM would tap the layers before them")
        top = [k + 1 for k in nested or ()]
    taps = list(top or ())
    if not all(isinstance(k, int) and 0 <= k < layers for k in taps) or taps != sorted(set(taps)):
        raise RecipeError(f"{raw.where}: {AUX} {taps} must be distinct, rising (vLLM sorts them) and in 0 … {layers - 1} for this target")
    return taps


def draft_ids(where: str, weights: dict[str, Tensor], U: int, V: int, ours: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
    """-> the target ids of the draft vocabulary, rising, and the tensors with d2t and t2d made anew and rows of lm_head in that order."""
    weights = dict(weights)
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if d2t is None:
        if U != V:
            raise RecipeError(f"{where}: tensor d2t is missing (draft_vocab_size {U}, vocabulary {V}): engines would take draft ids for target ids")
        ids_U = torch.arange(V)
    else:
        if d2t.shape != (U,) or not are_ids(d2t):
            raise RecipeError(f"{where}: d2t is {d2t.dtype} {tuple(d2t.shape)}, draft_vocab_size {U} asks for int64 ({U},)")
        if ours and d2t.dtype != torch.int64:
            raise RecipeError(f"{where}: d2t is {d2t.dtype}; engines expect int64")
        ids_U = d2t.long() + torch.arange(U)
    absolute = "d2t must hold offsets, target id = draft id + d2t[draft id]; it seems to hold target ids: subtract the draft ids"
    if int(ids_U.min()) < 0 or int(ids_U.max()) >= V or len(ids_U.unique()) != U:
        raise RecipeError(f"{where}: d2t leads to ids outside 0 … {V - 1}, or twice to one: {absolute}")
    if t2d is not None and (t2d.shape != (V,) or not torch.equal(t2d.bool(), draft_maps(ids_U, V)[1])):
        raise RecipeError(f"{where}: t2d does not agree with d2t: {absolute}")
    if ours and d2t is not None and t2d is None:
        raise RecipeError(f"{where}: tensor t2d is missing, by which d2t is checked: export the head again")
    order_U = ids_U.argsort()
    if not torch.equal(order_U, torch.arange(U)):
        if ours:
            raise RecipeError(f"{where}: the ids of d2t must rise; export the head again")
        if "lm_head.weight" in weights:
            weights["lm_head.weight"] = weights["lm_head.weight"][order_U]
    ids_U = ids_U[order_U]
    weights["d2t"], weights["t2d"] = draft_maps(ids_U, V)
    return (None if U == V else ids_U), weights


# ---- EAGLE-1

def export_eagle1(head: DraftHead, bias: bool) -> Files:
    """Two names of the architecture, for vLLM and SGLang, and an fc.bias of zeros where the head has none (SGLang always has one).

    bias: what the config says. The official code builds fc by it. vLLM does not, but gives *attention* biases to a head that says true, and leaves
    them as the memory was: every draft is then rejected (measured).
    """
    if tuple(head.taps) != ("final",):
        raise RecipeError(f"head.taps is {list(head.taps)}; EAGLE-1 layouts give a head the target's final state only: train with taps [final]")
    if "lm_head.weight" in head.state_dict():
        raise RecipeError("EAGLE-1 layouts use the target's lm_head, this head has trained its own: train with head.freeze_lm_head: true")
    if len(head.d2t) != head.geometry.vocab_size:
        raise RecipeError("EAGLE-1 layouts have no reduced vocabulary: export with --whole-vocabulary, or train without head.draft_vocab_size")
    config = {k: v for k, v in head.engine_config().items() if k not in (*PRIVATE, "draft_vocab_size")}
    weights = {k: v for k, v in head.state_dict().items() if k not in ("d2t", "t2d")}
    weights.setdefault("fc.bias", torch.zeros_like(weights["fc.weight"][:, 0]))
    return Files(config | {"architectures": EAGLE1_NAMES, "model_type": "llama", "bias": bias, "tie_word_embeddings": False}, weights)


def no_bias(tensors: dict[str, Tensor], where: str) -> None:
    """For vLLM, which drops an fc.bias without a word."""
    if "fc.bias" in tensors and bool(tensors["fc.bias"].any()):
        raise RecipeError(f"{where}: fc.bias is not zero, and vLLM drops it silently: export to eagle or sglang, or train without a bias")


def read_eagle1(raw: Raw, geometry: Geometry, ours: bool, bias: bool = True) -> Found:
    """bias: what the config of a folder of ours must say (export_eagle1)."""
    c, where = raw.config, raw.where
    if ours:
        require(raw, _CURES)
        if list(c["architectures"]) != EAGLE1_NAMES:
            raise RecipeError(f"{where}: architectures is {c['architectures']}; vLLM loads no LlamaForCausalLMEagle alone: write {EAGLE1_NAMES}")
        if c["tie_word_embeddings"] or "fc.bias" not in raw.tensors:
            raise RecipeError(f"{where}: an EAGLE-1 folder wants tie_word_embeddings false and an fc.bias (zeros): SGLang leaves a missing one "
                              "random; export the head again")
        if c.get("bias") is not bias:
            why = "the official code builds fc by it" if bias else "vLLM would give attention biases that are in no file"
            raise RecipeError(f"{where}: bias is {c.get('bias')!r}, write {str(bias).lower()}: {why}")
    check_config(raw, geometry)
    if c.get("num_hidden_layers", 1) != 1:
        raise RecipeError(f"{where}: num_hidden_layers is {c['num_hidden_layers']}, an EAGLE head has 1 (was the target's count copied?): write 1")
    weights, facts = renamed(raw.tensors, {}), []
    if weights.pop("embed_tokens.weight", None) is not None:
        facts.append("its embedding was left out: the target's is used, as in the engines")
    biased = c.get("bias", True)  # absent means true; engines that always have one are given zeros
    if "fc.bias" in weights and not biased and not bool(weights["fc.bias"].any()):
        del weights["fc.bias"]
    if bool(biased) != ("fc.bias" in weights) and "bias" in c and not ours:
        raise RecipeError(f"{where}: config.json says bias {biased}, and fc.bias is {'there' if 'fc.bias' in weights else 'missing'}: they disagree")
    if "fc.bias" in weights and not bool(weights["fc.bias"].any()):
        del weights["fc.bias"]
    section = {"type": "eagle", **layer_sizes(raw, geometry), "fc_bias": "fc.bias" in weights}
    weights["d2t"], weights["t2d"] = draft_maps(torch.arange(geometry.vocab_size), geometry.vocab_size)
    return Found(section, weights, None, own_values(raw, geometry, facts), facts)


def is_eagle1(raw: Raw) -> bool:
    return not any("hidden_norm" in name or name.endswith("d2t") for name in raw.tensors)


# ---- what both need

def require(raw: Raw, cures: dict[str, str]) -> None:
    for key, cure in cures.items():
        if key not in raw.config:
            raise RecipeError(f"{raw.where}: config.json has no {key}: {cure}; export the head again")


def check_config(raw: Raw, geometry: Geometry) -> None:
    """What every layout asks of a config, before anything is taken from it. RecipeError: flags and numbers that are none, quantised weights, the
    sizes of another target."""
    c = raw.config
    for name, part in (("", c), *((f"{name}.", c[name]) for name in _PARTS if c.get(name) is not None)):
        if not isinstance(part, dict):
            raise RecipeError(f"{raw.where}: {name[:-1]} must be a JSON object or null, found {_said(part)}: write what the head was trained with")
        for key in _FLAGS:
            _flag(raw.where, name + key, part.get(key))
        for key, most in _NUMBERS.items():
            _number(raw.where, name + key, part.get(key), most, key in _WHOLE)
    if c.get("quantization_config"):
        raise RecipeError(f"{raw.where}: quantization_config is {_said(c['quantization_config'])}: only unquantised heads can be read; get one, or "
                          "remove the key if the tensors are plain numbers")
    for key, wanted in (("hidden_size", geometry.hidden_size), ("vocab_size", geometry.vocab_size)):
        found = c.get(key, wanted)
        if found != wanted:
            raise RecipeError(f"{raw.where}: the head is for a target with {key} {found}, this target's is {wanted}: name the one it was trained for")


def _flag(where: str, key: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise RecipeError(f"{where}: {key} must be true or false, found {_said(value)}: write what the head was trained with")


def _number(where: str, key: str, value: Any, most: float, whole: bool) -> None:
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if value is not None and not (good and 0 < value <= most):
        raise RecipeError(f"{where}: {key} must be a {'whole ' * whole}number above 0 and at most {most:g}, found {_said(value)}: write what the "
                          "head was trained with")


def _said(value: Any) -> str:
    return shown([json.dumps(value)])


def are_ids(tensor: Tensor) -> bool:
    """Whether it holds whole numbers: floats would be cut off to other ids."""
    return tensor.dtype in (torch.int64, torch.int32)


def renamed(tensors: dict[str, Tensor], prefixes: dict[str, str]) -> dict[str, Tensor]:
    """Names without `model.`, prefixes replaced. RecipeError where two names become one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        for old, new in prefixes.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if name in found:
            raise RecipeError(f"two tensors are both {shown([name])}: one of them is left over from another layout")
        found[name] = tensor
    return found


def layer_sizes(raw: Raw, geometry: Geometry) -> dict[str, Any]:
    """The sizes of the head's own layers. RecipeError for an activation that they don't have."""
    c = raw.config
    if c.get("hidden_act") not in (None, "silu", "swish"):
        raise RecipeError(f"{raw.where}: hidden_act is {_said(c['hidden_act'])}, and a head's layers compute silu: only heads trained with silu can "
                          "be read")
    heads = c.get("num_attention_heads", geometry.num_heads)
    return {
        "hidden_size": geometry.hidden_size, "max_positions": c.get("max_position_embeddings"),
        "intermediate_size": c.get("intermediate_size"), "num_heads": heads, "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or geometry.hidden_size // heads,
    }


def own_values(raw: Raw, geometry: Geometry, facts: list[str]) -> dict[str, Any]:
    """Where the head's layer counts otherwise than the target: its rotary parameters, its epsilon (of layers as transformers reads them)."""
    own: dict[str, Any] = {}
    rope, theirs = head_rope(raw), rope_parameters(geometry)
    if rope != theirs:
        own["rope_parameters"] = rope
        facts.append(f"its rotary parameters are its own: {rope}, the target's are {theirs}")
    eps = raw.config.get("rms_norm_eps", 1e-6)
    if eps != geometry.rms_norm_eps:
        own["rms_norm_eps"] = eps
    return own


def head_rope(raw: Raw) -> dict[str, Any]:
    """Rotary parameters as a transformers 5 dict. RecipeError where the old and the new keys disagree: engines would too."""
    c = raw.config
    scaling = dict(c.get("rope_scaling") or {})
    old = _rope({"rope_theta": c.get("rope_theta", 10000.0), **scaling})
    if c.get("rope_parameters") is None:
        return old
    new = _rope(c["rope_parameters"])
    if "rope_theta" in c and old != new:
        raise RecipeError(f"{raw.where}: rope_theta/rope_scaling say {old}, rope_parameters say {new}: old and new transformers would differ; "
                          "make them agree")
    return new


def _rope(found: dict[str, Any]) -> dict[str, Any]:
    found = dict(found)
    kind = found.pop("type", None)
    return {"rope_type": kind or "default", "rope_theta": 10000.0, **found}
