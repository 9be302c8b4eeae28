"""generate()'s options: what was given, over a transformers GenerationConfig, over our defaults ─► Sampling, limits, end tokens.

Of a GenerationConfig everything that changes the text is taken over or refused by name, before anything is generated.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from draftheads.inference.requests import Limits, Sampling
from draftheads.inference.sampling import check
from draftheads.recipes.schema import RecipeError

MAX_NEW_TOKENS = 128
SAMPLING = tuple(f.name for f in fields(Sampling))
TAKEN = {*SAMPLING, "do_sample", "max_new_tokens", "max_length", "stop_strings", "eos_token_id"} - {"lossy", "typical_epsilon", "typical_alpha"}
# These change no token: ids that we do not write, and how transformers keeps its cache.
IDLE = {"pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "use_cache"}
# transformers' words for what is called otherwise here.
OURS = {
    "do_sample": "temperature (0 is greedy)", "max_length": "max_len", "num_beams": "nothing: there is no beam search", "stop": "stop_strings",
    "assistant_model": "draft", "assistant_tokenizer": "draft_tokenizer", "prompt_lookup_num_tokens": "draft='ngram' and gamma",
    "ngram_first": "copy_first='ngram'", "streamer": "SpeculativeDecoder.stream", "use_mtp": "draft='mtp'", "num_assistant_tokens": "gamma",
}


@dataclass(frozen=True)
class Options:
    """max_len None: what the longest prompt needs. eos_ids None: the target's own."""

    sampling: Sampling
    max_new_tokens: int
    max_len: int | None
    stop_strings: tuple[str, ...]
    eos_ids: frozenset[int] | None


def resolve(given: Mapping[str, Any], config: Any = None) -> Options:
    """given: the caller's arguments by name, None where not given. RecipeError for values that mean nothing, and for what `config` asks in vain."""
    asked = {} if config is None else _taken(config)
    chosen = {**asked, **{name: value for name, value in given.items() if value is not None}}
    if given.get("max_new_tokens") is not None and given.get("max_len") is None:
        chosen.pop("max_len", None)  # from max_length, over which transformers, too, lets the number of new tokens win
    sampling = Sampling(**{name: chosen[name] for name in SAMPLING if name in chosen})
    check(sampling)
    stops = chosen.get("stop_strings", ())
    stops = (stops,) if isinstance(stops, str) else stops
    found = Options(sampling, chosen.get("max_new_tokens", MAX_NEW_TOKENS), chosen.get("max_len"), stops, chosen.get("eos_ids"))
    check_limits(Limits(found.max_new_tokens, found.max_new_tokens if found.max_len is None else found.max_len, stops))
    return replace(found, stop_strings=tuple(stops))


def check_limits(limits: Limits) -> None:
    """RecipeError, one line, for lengths that are no whole numbers above 0, and stop strings that are no text or would end every answer at once."""
    whole("max_new_tokens", limits.max_new_tokens)
    whole("max_len", limits.max_len)
    stops = limits.stop_strings
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
        raise RecipeError(f"stop_strings is {stops!r:.80}; wanted a list of texts")
    if "" in stops:
        raise RecipeError("stop_strings holds an empty text: every answer would end at once; take it out")


def whole(name: str, value: object, least: int | None = 1, most: int | None = None) -> None:
    """RecipeError, one line, unless the value is an int from `least` to `most`, both included (None: no bound)."""
    if type(value) is not int or (least is not None and value < least) or (most is not None and value > most):
        bound = "" if least is None else f" of at least {least}" if most is None else f" of {least} … {most}"
        raise RecipeError(f"{name} is {value!r:.80}; wanted a whole number{bound}")


def _taken(config: Any) -> dict[str, Any]:
    """The values of a GenerationConfig under our names."""
    from transformers import GenerationConfig

    if not isinstance(config, GenerationConfig):
        raise RecipeError(f"generation_config is a {type(config).__name__}; wanted a transformers GenerationConfig")
    # Since transformers 5 unset values are None, and the defaults stand elsewhere.
    usual = {**GenerationConfig().to_dict(), **getattr(GenerationConfig, "_get_default_generation_params", dict)()}
    found = {name: value for name, value in config.to_dict().items() if value is not None}
    odd = sorted(name for name, value in found.items() if name not in TAKEN | IDLE and not _off(name, value, usual.get(name)))
    refused = [f"{name}={found[name]!r:.60}" for name in odd]
    if refused:
        raise RecipeError(f"generation_config: {', '.join(refused)} cannot be honoured by speculative decoding here; take it out "
                          f"(honoured are {', '.join(sorted(TAKEN))})")
    asked = {name: found[name] for name in SAMPLING if name in found}
    if found.get("do_sample"):
        asked = {"temperature": 1.0, "top_k": usual.get("top_k") or 0} | asked
    else:
        asked["temperature"] = 0.0
    asked |= {name: found[name] for name in ("max_new_tokens", "stop_strings") if name in found}
    if "max_length" in found and "max_new_tokens" not in found:
        asked |= {"max_new_tokens": found["max_length"], "max_len": found["max_length"]}
    if "eos_token_id" in found:
        ids = found["eos_token_id"]
        asked["eos_ids"] = frozenset([ids] if isinstance(ids, int) else ids)
    return asked


def _off(name: str, value: Any, usual: Any) -> bool:
    empty = value is False or (isinstance(value, Collection) and not value)
    return empty or value == usual or (name == "guidance_scale" and value == 1) or (name == "cache_implementation" and value != "quantized")


def refuse_unknown(unknown: Collection[str], known: Collection[str]) -> None:
    """RecipeError for arguments that do not exist, with the nearest one that does."""
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        cure = f"it is {OURS[name]} here" if name in OURS else f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise RecipeError(f"generate: unknown argument {name!r}; {cure}")
