"""The speculators library (vLLM serves such a folder by itself: its config names the target): EAGLE-3 with a nested config.

The flat layout with `layers.0.` for `midlayer.`, the target's embedding, and the layer's sizes in transformer_layer_config. Tap numbers count
like ours. Without norm_before_residual vLLM takes it for true here, and for false in flat configs. How many taps there are it finds among the
layer's keys only, where 3 is what it takes if there is no such key.
"""

from __future__ import annotations

from typing import Any

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Found, Raw, Tables, refuse
from draftheads.heads.formats.flat import AUX, export_eagle3, read_eagle3, require
from draftheads.recipes.schema import Geometry, RecipeError

TAKES = ("eagle3",)
LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
    "tie_word_embeddings", "torch_dtype", "num_aux_hidden_states",
)
SPECULATIVE_TOKENS = 4


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    if head.config.type != "eagle3":
        raise refuse("speculators", head.config.type, TAKES)
    flat = export_eagle3(head, tables, "vLLM", always_lm_head=True, unknown=("fc_bias",))
    c, family = flat.config, head.geometry.model_type
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": c["draft_vocab_size"], "target_hidden_size": c["hidden_size"],
        "norm_before_residual": c["norm_before_residual"], "norm_before_fc": c["norm_before_fc"], "fc_norm": c["fc_norm"],
        "norm_output": c["norm_output"], AUX: c[AUX], "tie_word_embeddings": False, "torch_dtype": c["torch_dtype"],
        "transformer_layer_config": {k: c[k] for k in LAYER_KEYS},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS, "verifier_accept_k": 1,
                                  "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": meta.target or None, "architectures": [_architecture(family)]},
        },
    }
    weights = {("layers.0." + n.removeprefix("midlayer.") if n.startswith("midlayer.") else n): t for n, t in flat.tensors.items()}
    weights["embed_tokens.weight"] = tables.embed_VD[: head.geometry.vocab_size]
    alone = "vllm serve THIS_FOLDER" if meta.target else "the target was a local folder: write its Hub id as verifier.name_or_path, then " \
                                                         "vllm serve THIS_FOLDER"
    return Files(config, weights, [alone])


def read(raw: Raw, geometry: Geometry, ours: bool = False) -> Found:
    c = raw.config
    kind = c.get("speculators_model_type")
    if kind != "eagle3":
        raise RecipeError(f"{raw.where}: speculators_model_type is {kind!r}; only eagle3 can be read: leave --from out, or check the folder")
    facts: list[str] = []
    if c.get("norm_before_residual") is None:
        if ours:
            raise RecipeError(f"{raw.where}: config.json has no norm_before_residual: vLLM takes that for true in this layout; write what it was "
                              "trained with")
        facts.append("it does not say norm_before_residual, which was taken for true, as vLLM does in this layout")
    layer = c.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise RecipeError(f"{raw.where}: config.json has no transformer_layer_config: not a speculators folder")
    if ours:
        require(raw, {"target_hidden_size": "write the target's hidden size", "speculators_config": "vLLM finds the target by it",
                      "tie_word_embeddings": "write false"})
        if "embed_tokens.weight" not in raw.tensors:
            raise RecipeError(f"{raw.where}: embed_tokens.weight is missing: speculators loads it; export the head again")
    if "midlayer.hidden_norm.weight" in raw.tensors:
        raise RecipeError(f"{raw.where}: its tensors are named midlayer.*, this layout's are layers.0.*; use --to vllm for the flat layout")
    said = {k: v for k, v in c.items() if k not in ("model_type", "speculators_config", "norm_before_residual")}
    residual = c.get("norm_before_residual")
    nested = Raw(raw.where, {**layer, **said, "norm_before_residual": residual is None or residual}, raw.tensors)
    return read_eagle3(nested, geometry, ours, facts=facts)


def target_of(config: dict[str, Any]) -> str | None:
    found = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return found if isinstance(found, str) and found else None


def _architecture(family: str) -> str:
    return "".join(part.capitalize() for part in family.split("_")) + "ForCausalLM"
