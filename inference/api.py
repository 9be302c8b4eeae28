"""The library's front door: `generate` for a list of prompts, `SpeculativeDecoder` to keep a target and a drafter and to stream.

    generate("smollm2-135m", prompts=["The capital of France is"], draft="suffix")
    for piece in SpeculativeDecoder.from_checkpoint("runs/smollm2-135m/ckpt/final").stream([{"role": "user", "content": "Hi"}]): …

What a draft may be: drafters/choose.py. What a tree may be: shapes.py.
"""

from __future__ import annotations

import copy
import inspect
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftheads.heads.checkpoint import HeadMeta, adapter_of, read_meta, stored_recipe
from draftheads.inference.checkpoints import find_folder
from draftheads.inference.decode import complete, decode
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.choose import COPIED, Draft, check_draft, choose
from draftheads.inference.gguf import one_line
from draftheads.inference.options import check_limits, refuse_unknown, resolve, whole
from draftheads.inference.requests import Completion, Limits, Request, Round, Sampling
from draftheads.inference.rows import refusal
from draftheads.inference.shapes import MOST_NODES, Shape, parse_shape
from draftheads.inference.target import Target
from draftheads.inference.text import TextStream, final_text
from draftheads.recipes.schema import RecipeError

# Text as it is, a chat (the template is applied, with a generation prompt), or token ids.
Prompt = str | Sequence[dict[str, str]] | Sequence[int]


class SpeculativeDecoder:
    """A target and a drafter, ready to complete or stream prompts.

    drafter: a Drafter, or whatever `generate` takes as draft. gamma: length of a chain. tree: a Shape or its text, for drafters that can grow one.
    The last `stream`'s Completion is in `last` when it has ended.
    """

    def __init__(self, target: Target, drafter: Draft = None, *, copy_first: str | None = None, draft_tokenizer: Any = None, gamma: int = 4,
                 tree: Shape | str | None = None) -> None:
        self.plan = _plan(gamma, tree)
        self.target = target
        copied = {} if copy_first is None else {"gamma": max(gamma, COPIED)}  # alone, copying is as long as the plan's gamma
        self.drafter = choose(drafter, target, copy_first=copy_first, draft_tokenizer=draft_tokenizer, ngram=copied, suffix=copied)
        self.last: Completion | None = None

    @classmethod
    def from_checkpoint(cls, folder: str | os.PathLike[str], target: Target | None = None, *, copy_first: str | None = "ngram", gamma: int = 4,
                        tree: Shape | str | None = None, chat_template: str | os.PathLike[str] | None = None) -> SpeculativeDecoder:
        """A checkpoint folder (or a run folder: its ckpt/final) names its target; copying from the context goes first unless copy_first=None.

        chat_template: path of the jinja file that the head was trained with, where its tokenizer has none and the run's recipe is not here.
        """
        folder = find_folder(Path(folder).expanduser())
        if target is None:
            meta = read_meta(folder)
            target = Target.load(meta.target, revision=meta.revision, geometry=meta.geometry, chat_template=_template(folder, meta, chat_template),
                                 adapter=adapter_of(folder, meta))
        return cls(target, folder, copy_first=copy_first, gamma=gamma, tree=tree)

    def complete(self, prompts: Sequence[Prompt], sampling: Sampling | None = None, limits: Limits | None = None, *, seed: int = 0,
                 batch_size: int = 1) -> list[Completion]:
        """Completions with their text, in the order of the prompts; row i draws with seed + i. RecipeError if a prompt cannot be served."""
        limits = limits or Limits()
        whole("seed", seed, None)
        whole("batch_size", batch_size)
        requests = [Request(str(i), encode(self.target, p), seed + i) for i, p in enumerate(prompts)]
        self._check(requests, limits)
        done = complete(self.target, self.drafter, requests, sampling or Sampling(), limits, batch_size=batch_size, plan=self.plan)
        for c in done:
            c.text = final_text(self.target.tokenizer, c.tokens, limits.stop_strings)
        return done

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, limits: Limits | None = None, *, seed: int = 0) -> Iterator[str]:
        """Pieces of text as they become certain; joined they are the completion's text."""
        for _, piece in self.stream_rounds(prompt, sampling, limits, seed=seed):
            if piece:
                yield piece

    def stream_rounds(self, prompt: Prompt, sampling: Sampling | None = None, limits: Limits | None = None, *,
                      seed: int = 0) -> Iterator[tuple[Round, str]]:
        """Every Round with the text it adds (possibly ""): to show which tokens were drafted."""
        limits = limits or Limits()
        whole("seed", seed, None)
        request = Request("0", encode(self.target, prompt), seed)
        self._check([request], limits)
        text = TextStream(self.target.tokenizer, limits.stop_strings)
        for round_ in decode(self.target, self.drafter, [request], sampling or Sampling(), limits, plan=self.plan):
            piece = text.push(round_.new_tokens.get(request.id, []))
            for self.last in round_.finished:
                piece += text.finish()
                self.last.text = final_text(self.target.tokenizer, self.last.tokens, limits.stop_strings)
            yield round_, piece

    def _check(self, requests: Sequence[Request], limits: Limits) -> None:
        check_limits(limits)
        for request in requests:
            if (reason := refusal(request, self.target, limits)) is not None:
                raise RecipeError(reason)


def generate(
    model: Any,
    tokenizer: Any = None,
    prompts: Sequence[Prompt] = (),
    *,
    draft: Draft = None,
    draft_tokenizer: Any = None,
    copy_first: str | None = None,
    gamma: int = 4,
    tree: Shape | str | None = None,
    max_new_tokens: int | None = None,
    max_len: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    min_new_tokens: int | None = None,
    lossy: str | None = None,
    typical_epsilon: float | None = None,
    typical_alpha: float | None = None,
    stop_strings: Sequence[str] | None = None,
    generation_config: Any = None,
    seed: int = 0,
    batch_size: int = 1,
    return_completions: bool = False,
    **unknown: Any,
) -> list[str] | list[Completion]:
    """Complete prompts losslessly (unless `lossy`), faster where drafts are accepted. Returns texts, or Completions.

    model        a transformers causal LM (with its tokenizer), a Target, or a name for Target.load
    prompts      texts, continued as they are; chats (lists of {"role", "content"}), through the chat template; or lists of token ids
    draft        None (autoregressive), "ngram", "suffix", "mtp", the folder of a checkpoint or a run, a smaller model (folder, name, or a
                 transformers model; draft_tokenizer: None is the target's), or a Drafter
    copy_first   "ngram" or "suffix": copying goes before a head or a model, which drafts where there is nothing to copy
    gamma, tree  tokens of a chain; or a tree, e.g. "dynamic:depth=5,top_k=8,nodes=24" (shapes.py), for drafters that can grow one
    generation_config  a transformers GenerationConfig: its values where no argument says otherwise; what cannot be honoured is refused by
                 name. Without it the model's own generation_config counts for its end tokens only

    Sampling options: requests.Sampling has their meaning and defaults (temperature 0: greedy). max_new_tokens: 128. max_len: prompt and new
    tokens; None is what the longest prompt needs. Row i draws with seed + i. RecipeError, one line, before generation for anything that is wrong.
    """
    # Before anything is loaded.
    refuse_unknown(unknown, [name for name in inspect.signature(generate).parameters if name != "unknown"])
    if isinstance(prompts, str):
        raise RecipeError("generate: prompts is a list; put a single prompt in one")
    options = resolve(
        {"max_new_tokens": max_new_tokens, "max_len": max_len, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
         "repetition_penalty": repetition_penalty, "no_repeat_ngram_size": no_repeat_ngram_size, "min_new_tokens": min_new_tokens, "lossy": lossy,
         "typical_epsilon": typical_epsilon, "typical_alpha": typical_alpha, "stop_strings": stop_strings}, generation_config)
    whole("seed", seed, None)
    whole("batch_size", batch_size)
    _plan(gamma, tree)
    check_draft(draft, copy_first, draft_tokenizer)
    target = _target(model, tokenizer)
    if options.eos_ids is not None and options.eos_ids != target.eos_ids:
        target = copy.copy(target)
        target.eos_ids = options.eos_ids
    decoder = SpeculativeDecoder(target, draft, copy_first=copy_first, draft_tokenizer=draft_tokenizer, gamma=gamma, tree=tree)
    longest = options.max_len
    if longest is None:
        longest = max((len(encode(target, p)) for p in prompts), default=0) + options.max_new_tokens
    limits = Limits(options.max_new_tokens, longest, options.stop_strings)
    done = decoder.complete(prompts, options.sampling, limits, seed=seed, batch_size=batch_size)
    return done if return_completions else [c.text or "" for c in done]


def encode(target: Target, prompt: Prompt) -> tuple[int, ...]:
    """Prompt → token ids. Text gets the special tokens its tokenizer adds; the chat template writes its own."""
    if isinstance(prompt, str):
        return tuple(target.tokenizer(prompt)["input_ids"])
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], dict):
        if not getattr(target.tokenizer, "chat_template", None):
            raise RecipeError(f"{target.name} has no chat template: pass text, or load the target with chat_template=PATH")
        try:
            text = target.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja's errors and whatever the template raises
            raise RecipeError(f"the chat template of {target.name} refuses the prompt: {one_line(error)}") from None
        return tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    try:
        if any(isinstance(t, bool) for t in prompt):
            raise TypeError
        return tuple(operator.index(t) for t in prompt)  # type: ignore[arg-type]
    except TypeError:
        raise RecipeError(f'a prompt is {prompt!r:.80}; wanted text, a chat (a list of {{"role", "content"}}), or a list of token ids') from None


def _plan(gamma: int, tree: Shape | str | None) -> Plan:
    """RecipeError, one line, for a length or a tree that is none."""
    whole("gamma", gamma, 1, MOST_NODES)
    if not isinstance(tree, Shape | str | None):
        raise RecipeError(f"tree is {tree!r:.80}; wanted None, a Static, Dynamic or Sampled, or their text: dynamic:depth=5,top_k=8,nodes=24")
    return Plan(gamma, tree=parse_shape(tree) if isinstance(tree, str) else tree)


def _target(model: Any, tokenizer: Any) -> Target:
    if isinstance(model, Target):
        return model
    if isinstance(model, str | os.PathLike):
        return Target.load(str(model))
    if tokenizer is None:
        raise RecipeError("generate: a transformers model needs its tokenizer: generate(model, tokenizer, prompts=[…])")
    if model.get_input_embeddings().weight.is_meta:
        raise RecipeError("generate: the model's embeddings are offloaded; keep them in memory (device_map={\"model.embed_tokens\": …})")
    return Target.from_model(model, tokenizer)


def _template(folder: Path, meta: HeadMeta, given: str | os.PathLike[str] | None) -> str | None:
    """The given chat template, else the one of the recipe that the head was trained by."""
    if given is not None:
        return os.fspath(given)
    stored = (stored_recipe(folder, meta).get("target") or {}).get("chat_template")
    if stored is not None and not Path(stored).is_file():
        raise RecipeError(f"{folder} was trained with the chat template {stored}, which is not there; give its place: chat_template=PATH")
    return stored
