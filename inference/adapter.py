"""LoRA adapters of a target (arXiv 2106.09685), in peft's own files: put on for training, merged into the weights for everything else.

    training   unpacked target ─► add_adapter ─► trained ─► write_adapter: adapter_config.json + adapter_model.safetensors
    use        model ─► merge_adapter: W + alpha / rank · B A ─► a model like any other, before its weights are packed

Merging is done here, not by peft: it is one product a layer, takes no import of seven seconds, and what does not fit is an error, where peft warns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftheads.heads.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, check_adapter
from draftheads.inference.gguf import one_line, quiet
from draftheads.inference.saving import STAMP, stamped_adapter
from draftheads.inference.sources import Source
from draftheads.recipes.schema import MOST_ALPHA, LoraSection, RecipeError

PREFIX = "base_model.model."
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of peft's LoRA config, what would make of its matrices something else than W + alpha / rank · B A.
OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "target_parameters", "fan_in_fan_out",
               "trainable_token_indices", "layer_replication")


def add_adapter(model: Any, lora: LoraSection) -> Any:
    """peft's wrapper around the model, in whose layers the adapter is from now on: float32, requiring gradients, with no effect yet (B is 0).

    A is drawn from torch's global generator. RecipeError if there are no such layers, or if it could not be merged."""
    places = check_modules(model, lora.target_modules)
    from peft import LoraConfig, get_peft_model

    # Not peft's "all-linear": of a mixture of experts it takes the experts' tensors, too, for which it has another kind of adapter.
    config = LoraConfig(r=lora.rank, lora_alpha=_whole(lora.alpha), lora_dropout=lora.dropout, task_type="CAUSAL_LM",
                        target_modules=list(lora.target_modules or places))
    with quiet():
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:  # layers of a kind that peft cannot adapt
            raise RecipeError(f"train.lora: {one_line(error)}") from error
    if other := _other_kinds(wrapped.peft_config["default"].to_dict()):
        raise RecipeError(f"train.lora: peft makes {', '.join(other)} of these layers (of a mixture of experts), and only plain LoRA can be "
                          "merged: name others in train.lora.target_modules, as [q_proj, k_proj, v_proj, o_proj]")
    return wrapped


def try_adapter(model: Any, lora: LoraSection) -> None:
    """add_adapter's RecipeErrors, before the long work: on a twin without weights. The model may be packed, and stays as it is."""
    check_modules(model, lora.target_modules)  # before peft's seven seconds
    with torch.device("meta"):
        add_adapter(type(model)(model.config), lora)


def check_modules(model: Any, names: Sequence[str] | None) -> list[str]:
    """The places of the linear layers with these names (None: all). RecipeError for train.lora.target_modules that name none, or the lm_head or
    embedding, which heads borrow."""
    modules = dict(model.named_modules())
    borrowed = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    linear = [place for place, m in modules.items() if hasattr(m, "in_features") and id(m) not in borrowed]
    for name in names or ():
        found = [place for place in modules if place == name or place.endswith("." + name)]
        if any(id(modules[place]) in borrowed for place in found):
            raise RecipeError(f"train.lora.target_modules has {name}, which the head borrows from the target and which stays as it is: leave it out")
        if not set(found) & set(linear):
            known = sorted({place.rsplit(".", 1)[-1] for place in linear})
            raise RecipeError(f"train.lora.target_modules: the target has no linear layer {name or repr(name)}; it has {', '.join(known)}")
    if not linear:
        raise RecipeError("train.lora: the target has no linear layer that could be adapted")
    return linear


def _other_kinds(raw: dict[str, Any]) -> list[str]:
    """What makes of an adapter_config.json something else than plain LoRA."""
    return [key for key in OTHER_KINDS if raw.get(key)] + ["bias"] * (raw.get("bias", "none") != "none")


def write_adapter(wrapped: Any, base: str, revision: str | None, folder: Path) -> None:
    """Into a folder that is there. base: what adapter_config.json calls the target; no path. The same weights give the same bytes."""
    from peft import get_peft_model_state_dict

    raw = wrapped.peft_config["default"].to_dict() | {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
    text = json.dumps(raw, indent=2, sort_keys=True, default=sorted)  # peft has the layers' names in a set
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    weights = {n: t.detach().float().cpu().contiguous() for n, t in get_peft_model_state_dict(wrapped, save_embedding_layers=False).items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_WEIGHTS).chmod(0o644)  # safetensors makes it private


def tune(model: Any, source: Source, adapter: Adapter | None) -> Adapter | None:
    """What is in the weights of a model that was just loaded from `source`: `adapter`, merged now, or what the folder was saved with."""
    merged = stamped_adapter(source.path if source.local else _downloaded(source))
    if adapter is None or adapter == merged:
        return merged
    if merged is not None:
        raise RecipeError(f"{source.name} has another adapter merged into it than this head was trained with: name the original target")
    merge_adapter(model, adapter, source.name)
    return adapter


def _downloaded(source: Source) -> Path | None:
    """The folder of a Hub target's stamp, which a tuned target keeps when it is pushed; None if it has none."""
    from transformers.utils import cached_file

    file = cached_file(source.path, STAMP, revision=source.revision, _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False)
    return None if file is None else Path(file).parent


@torch.no_grad()
def merge_adapter(model: Any, adapter: Adapter, name: str) -> None:
    """Into the model's weights, in place. RecipeError: files that are missing, altered, or made for another model; name: the model's, for it."""
    check_adapter(adapter)
    scale, pairs = _read(adapter.folder)
    borrowed = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    layers: dict[str, nn.Linear] = {}
    for place, (A_RI, B_OR) in pairs.items():  # all are looked at before any is changed
        layer = _layer(model, place)
        # No subclass: those of quantised models hold codes, to which the sum would be rounded back.
        plain = type(layer) is nn.Linear and layer.weight.dtype in DTYPES
        shape = tuple(layer.weight.shape) if plain and isinstance(layer, nn.Linear) else None
        wanted = (B_OR.shape[0], A_RI.shape[1])
        if not isinstance(layer, nn.Linear) or id(layer) in borrowed or shape != wanted:
            odd = f"{shape} there" if shape != wanted else "a table there that the head borrows"
            has = "no unquantised linear layer there" if shape is None else odd
            raise RecipeError(f"{adapter.folder} is no adapter of {name}: it adapts {place} {wanted}, the target has {has}")
        layers[place] = layer
    for place, (A_RI, B_OR) in pairs.items():
        weight_OI = layers[place].weight
        delta_OI = (B_OR @ A_RI * scale).to(weight_OI.device)
        weight_OI.copy_(weight_OI.float() + delta_OI)


def _layer(model: Any, place: str) -> nn.Module | None:
    try:
        found: nn.Module = model.get_submodule(place)
    except AttributeError:
        return None
    return found


def _read(folder: Path) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """-> alpha / rank, and A [R, I] and B [O, R] (float32) by the layer's place in the model."""
    where = folder / ADAPTER_CONFIG
    try:
        raw = json.loads(where.read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise RecipeError(f"cannot read the adapter in {folder}: {one_line(error)}") from None
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise RecipeError(f"{where} is no LoRA adapter's config (peft_type LORA, with r and lora_alpha)")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if type(rank) is not int or rank < 1:  # True is an int, too
        raise RecipeError(f"{where} has r {repr(rank)[:80]}; wanted a whole number from 1: it is damaged")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= MOST_ALPHA:
        raise RecipeError(f"{where} has lora_alpha {repr(alpha)[:80]}; wanted a number above 0, up to {MOST_ALPHA:.0f}: it is damaged")
    if other := _other_kinds(raw):
        raise RecipeError(f"{where} has {', '.join(other)}: only plain LoRA can be merged")
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(tensors):
        place, _, end = name.removeprefix(PREFIX).rpartition(".lora_")
        twin = f"{PREFIX}{place}.lora_{'B' if end == 'A.weight' else 'A'}.weight"
        if not name.startswith(PREFIX) or end not in ("A.weight", "B.weight") or twin not in tensors:
            raise RecipeError(f"{folder / ADAPTER_WEIGHTS}: {name} is no matrix of a plain LoRA adapter, or its other half is missing")
        if end == "A.weight":
            if odd := {tensors[n].dtype for n in (name, twin)} - set(DTYPES):
                raise RecipeError(f"{folder / ADAPTER_WEIGHTS}: {place} has matrices of {odd.pop()}; wanted float32, bfloat16 or float16")
            A_RI, B_OR = tensors[name].float(), tensors[twin].float()
            shaped = A_RI.dim() == B_OR.dim() == 2 and A_RI.shape[0] == B_OR.shape[1] == rank
            if not shaped or not (A_RI.isfinite().all() and B_OR.isfinite().all()):
                raise RecipeError(f"{folder / ADAPTER_WEIGHTS}: {place} has matrices {tuple(A_RI.shape)} and {tuple(B_OR.shape)}; wanted finite "
                                  f"ones of rank {rank}")
            pairs[place] = (A_RI, B_OR)
    if not pairs:
        raise RecipeError(f"{folder / ADAPTER_WEIGHTS} holds no matrices")
    return float(alpha) / rank, pairs


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
