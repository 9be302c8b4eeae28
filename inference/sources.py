"""Where a target comes from, and what its config says: named targets, Hub ids, folders, GGUF files. Every failure is one line with a cure.

name ─► locate: a folder or a Hub id ─► load: config (family refused before the weights), model, tokenizer
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from draftheads.inference.gguf import NAMED, converted, one_line, packaged, quiet
from draftheads.recipes.schema import Geometry, RecipeError

SUPPORTED = "supported: llama, qwen2, qwen3, mistral, gemma2, gemma3, phi3, olmo2, gpt_neox, mixtral, qwen3_moe and other attention-only families"
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Source:
    """Where transformers loads from: a local folder or a Hub id (then revision counts)."""

    name: str
    path: str
    revision: str | None = None
    local: bool = True
    gguf: Path | None = None  # what `path` was converted from


def locate(name: str, revision: str | None = None) -> Source:
    """Resolve a target's name. GGUF files are converted here (once)."""
    if not name:
        raise RecipeError("no target is named here (the head was published without one): name it, --set target.name=NAME, or "
                          "--target NAME for specdec export")
    if name in NAMED:
        gguf = packaged(name)
        return Source(name, str(converted(gguf, name)), gguf=gguf)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise RecipeError(f"no GGUF file at {path}: check target.name")
        return Source(name, str(converted(path, name)), gguf=path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RecipeError(f"{path} has no config.json, so it is not a Hugging Face model folder: check target.name")
        return Source(name, str(path))
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise RecipeError(f"no model folder at {path}: check target.name (a folder, a Hub id ORG/NAME, a .gguf file, or one of {', '.join(NAMED)})")
    return Source(name, name, revision, local=False)


def load(
    source: Source, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, geometry: Geometry | None
) -> tuple[Any, Any, str | None]:
    """-> model (eval, on the device), tokenizer, the commit of a Hub model. The config is judged before any weight is read."""
    try:
        return _load(source, dtype, device, trust_remote_code, geometry)
    except _Unreadable as error:
        if source.gguf is None:
            raise RecipeError(str(error)) from error
    # The kept conversion is damaged in a way its sizes don't show: once more, from the GGUF file.
    converted(source.gguf, source.name, anew=True)
    try:
        return _load(source, dtype, device, trust_remote_code, geometry)
    except _Unreadable as error:
        raise RecipeError(str(error)) from error


class _Unreadable(Exception):
    pass


def _load(
    source: Source, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, geometry: Geometry | None
) -> tuple[Any, Any, str | None]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not source.local:
        common |= {"revision": source.revision, "local_files_only": _only_cached(source)}
    with quiet():
        try:
            config, text = _config(source, common)
            if geometry is not None:
                check_geometry(geometry, geometry_of(text, text.vocab_size), source.name)
            tokenizer = AutoTokenizer.from_pretrained(source.path, **common)
            place = {} if device.type == "cpu" else {"device_map": {"": device}}
            # Safetensors only: a pickled checkpoint is refused.
            model = AutoModelForCausalLM.from_pretrained(source.path, config=config, dtype=dtype, use_safetensors=True, **place, **common)
        except RecipeError:
            raise
        except Exception as error:  # safetensors', tokenizers' and remote code's errors have no common base
            raise _Unreadable(f"cannot load the target {source.name}: {one_line(error)}; {_cure(source)}") from error
    return model.eval(), tokenizer, getattr(config, "_commit_hash", None) or source.revision


def read_geometry(name: str, revision: str | None, trust_remote_code: bool) -> Geometry:
    """From config.json alone, without loading the model. RecipeError where there is none to be had."""
    source = locate(name, revision)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not source.local:
        common |= {"revision": source.revision, "local_files_only": _in_cache(source, "config.json") is not None}
    with quiet():
        try:
            _, text = _config(source, common)
            return geometry_of(text, text.vocab_size)
        except RecipeError:
            raise
        except Exception as error:  # as in loading
            raise RecipeError(f"cannot read the config of {name} ({one_line(error)}): {_cure(source)}, or write target.geometry into the "
                              "recipe") from error


def describe(source: Source, trust_remote_code: bool, geometry: Geometry | None) -> tuple[Any, Any, Geometry, str | None]:
    """-> an object with the target's config and generation_config, its tokenizer, its geometry, the commit of a Hub model. No weight is read."""
    from transformers import AutoTokenizer, GenerationConfig

    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not source.local:
        common |= {"revision": source.revision, "local_files_only": _in_cache(source, "config.json") is not None}
    with quiet():
        try:
            config, text = _config(source, common)
            found = geometry_of(text, text.vocab_size)
            if geometry is not None:
                check_geometry(geometry, found, source.name)
            tokenizer = AutoTokenizer.from_pretrained(source.path, **common)
        except RecipeError:
            raise
        except Exception as error:  # as in loading
            raise RecipeError(f"cannot read the config and the tokenizer of {source.name} ({one_line(error)}): {_cure(source)}") from error
        try:
            generation = GenerationConfig.from_pretrained(source.path, **{k: v for k, v in common.items() if k != "trust_remote_code"})
        except (OSError, ValueError):  # a model need not have one
            generation = None
    return SimpleNamespace(config=config, generation_config=generation), tokenizer, found, getattr(config, "_commit_hash", None) or source.revision


def _config(source: Source, common: dict[str, Any]) -> tuple[Any, Any]:
    """-> the config, and its text part, of a family that we can decode."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(source.path, **common)
    text, kind = config.get_text_config(decoder=True), type(config)
    check_family(text, MODEL_FOR_CAUSAL_LM_MAPPING[kind] if kind in MODEL_FOR_CAUSAL_LM_MAPPING else None, source.name)
    return config, text


def _only_cached(source: Source) -> bool:
    """True if the model is on this disk already. Otherwise ask the Hub once, briefly: transformers itself would retry for half a minute."""
    from huggingface_hub import constants, model_info

    if _in_cache(source, "config.json") and _weights_in_cache(source):
        return True
    cure = "download it beforehand (hf download), or give a folder"
    if constants.HF_HUB_OFFLINE:
        raise RecipeError(f"the target {source.name} is not wholly in the local cache and the Hub is switched off (HF_HUB_OFFLINE): {cure}")
    try:
        model_info(source.path, revision=source.revision, timeout=5)
    except Exception as error:  # httpx's, huggingface_hub's and OS errors have no common base
        why = f"cannot get the target {source.name} from the Hub ({one_line(error)})"
        raise RecipeError(f"{why}: check the name and hf auth login, {cure}") from error
    return False


def _in_cache(source: Source, file: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.path, file, revision=source.revision)
    return found if isinstance(found, str) else None


def _weights_in_cache(source: Source) -> bool:
    """All of them: a tokenizer that was loaded alone leaves the config there without them, an interrupted download some of them."""
    index = _in_cache(source, "model.safetensors.index.json")
    if index is None:
        return _in_cache(source, "model.safetensors") is not None
    shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    return all(_in_cache(source, shard) is not None for shard in shards)


def _cure(source: Source) -> str:
    if source.local:
        return "check that the folder is complete"
    return ("check its name and revision (target.name, target.revision), and allow its own code if it brings some (--set "
            "target.trust_remote_code=true, for export and import --trust-remote-code)")


# --- what the config says ------------------------------------------------------------------------------------------------------------------


def check_family(config: Any, model_class: Any, name: str) -> None:
    """Refuse families whose state is not one key and value per token."""
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    recurrent = any(word in kind for kind in odd for word in ("linear", "mamba", "conv", "recurrent", "hybrid"))
    if getattr(model_class, "_is_stateful", False) or recurrent:
        raise RecipeError(f"{name}: {config.model_type} keeps a recurrent state, which can neither verify a tree nor be rolled back; {SUPPORTED}")
    if odd:
        raise RecipeError(f"{name}: {config.model_type} has layers of type {', '.join(odd)}, whose mask is not known here; {SUPPORTED}")


def geometry_of(config: Any, vocab_size: int) -> Geometry:
    """Geometry from a transformers text config; vocab_size is the number of lm_head rows."""
    heads = config.num_attention_heads
    eps = next((getattr(config, key) for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if getattr(config, key, None)), 1e-6)
    rope = getattr(config, "rope_parameters", None)
    return Geometry(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None) or 2048,
        rms_norm_eps=float(f"{eps:.6g}"),  # GGUF stores it as float32
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        **({"rope_parameters": json.loads(json.dumps(rope))} if rope else {}),
    )


def check_geometry(wanted: Geometry, found: Geometry, name: str) -> None:
    """The recipe's geometry against the target's; of the rope parameters only those the recipe names."""
    for field in Geometry.model_fields:
        want: Any = getattr(wanted, field)
        have: Any = getattr(found, field)
        if field == "rope_parameters":
            have = {key: value for key, value in have.items() if key in want}
        if want != have:
            differ = f"target.geometry.{field} is {want} in the recipe but {have} in the target {name}"
            raise RecipeError(f"{differ}: mend the recipe, or leave geometry out")


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: those of generation_config, config and tokenizer, and the special token with which the template ends a turn."""
    found: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
        _turn_end(tokenizer),
    ):
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def _turn_end(tokenizer: Any) -> int | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    answer = "zq"
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}], tokenize=False)
    except Exception:  # templates raise what they like on conversations they don't take
        return None
    ids = tokenizer(text[text.rfind(answer) + len(answer) :].strip(), add_special_tokens=False)["input_ids"]
    return ids[0] if len(ids) == 1 and ids[0] in _special_ids(tokenizer) else None


def _special_ids(tokenizer: Any) -> set[int]:
    return set(tokenizer.all_special_ids) | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def template_hash(tokenizer: Any) -> str:
    """sha256 of chat template and special tokens, 16 hex digits: heads trained under another template are refused."""
    special = {key: str(value) for key, value in sorted(getattr(tokenizer, "special_tokens_map", {}).items())}
    text = json.dumps([getattr(tokenizer, "chat_template", None), special], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def set_chat_template(tokenizer: Any, path: str | None) -> None:
    """Use the jinja file where one is given. Without any template only plain texts can be prompts: rendering a chat says so."""
    if path is not None:
        try:
            tokenizer.chat_template = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"cannot read target.chat_template {path}: {one_line(error)}") from None
