"""The library's front door: `generate` for a list of prompts, `SpeculativeDecoder` to keep a target and a drafter and to stream.

    generate("smollm2-135m", prompts=["The capital of France is"], draft="ngram")
    for piece in SpeculativeDecoder.from_checkpoint("runs/smollm2-135m/ckpt/final").stream([{"role": "user", "content": "Hi"}]): …
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftheads.heads.checkpoint import HeadMeta, load_head, read_meta, stored_recipe
from draftheads.inference.decode import complete, decode
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Completion, Limits, Request, Round, Sampling
from draftheads.inference.rows import refusal
from draftheads.inference.target import Target
from draftheads.inference.text import TextStream, final_text
from draftheads.recipes.files import existing_folder
from draftheads.recipes.schema import RecipeError

# Text as it is, a chat (the template is applied, with a generation prompt), or token ids.
Prompt = str | Sequence[dict[str, str]] | Sequence[int]
Draft = str | os.PathLike[str] | Drafter | None


class SpeculativeDecoder:
    """A target and a drafter, ready to complete or stream prompts.

    `rounds` of the last `stream` are in `last` (a Completion) when it has ended.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, *, gamma: int = 4) -> None:
        self.target, self.drafter, self.plan = target, drafter if drafter is not None else NoDrafter(), Plan(gamma)
        self.last: Completion | None = None

    @classmethod
    def from_checkpoint(cls, folder: str | os.PathLike[str], target: Target | None = None, *, gamma: int = 4,
                        ngram: bool = True, chat_template: str | os.PathLike[str] | None = None) -> SpeculativeDecoder:
        """A checkpoint folder (or a run folder: its ckpt/final) names its target; n-gram copying first unless ngram=False.

        chat_template: path of the jinja file that the head was trained with, where its tokenizer has none and the run's recipe is not here.
        """
        folder = _checkpoint(Path(folder))
        if target is None:
            meta = read_meta(folder)
            target = Target.load(meta.target, revision=meta.revision, geometry=meta.geometry, chat_template=_template(folder, meta, chat_template))
        head, _ = load_head(folder, geometry=target.geometry, template_hash=target.template_hash)
        drafter: Drafter = HeadDrafter(head, target)
        return cls(target, Composite(NgramDrafter(gamma=max(gamma, 8)), drafter) if ngram else drafter, gamma=gamma)

    def complete(self, prompts: Sequence[Prompt], sampling: Sampling | None = None, limits: Limits | None = None, *, seed: int = 0,
                 batch_size: int = 1) -> list[Completion]:
        """Completions with their text, in the order of the prompts; row i draws with seed + i. RecipeError if a prompt cannot be served."""
        limits = limits or Limits()
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
        for request in requests:
            if (reason := refusal(request, self.target, limits)) is not None:
                raise RecipeError(reason)


def generate(
    model: Any,
    tokenizer: Any = None,
    prompts: Sequence[Prompt] = (),
    *,
    draft: Draft = None,
    gamma: int = 4,
    ngram_first: bool = False,
    max_new_tokens: int = 128,
    max_len: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_strings: Sequence[str] = (),
    seed: int = 0,
    batch_size: int = 1,
    return_completions: bool = False,
) -> list[str] | list[Completion]:
    """Complete prompts losslessly, faster where drafts are accepted.

    model: a transformers causal LM (with its tokenizer), a Target, or a name for Target.load. draft: None (autoregressive), "ngram", the
    folder of a checkpoint, or a Drafter; ngram_first puts n-gram copying before a head. Text prompts are continued as they are; a list of
    {"role", "content"} goes through the chat template. max_len None: what the longest prompt needs. Returns texts, or Completions.
    """
    if isinstance(prompts, str):
        raise RecipeError("generate: prompts is a list; put a single prompt in one")
    target = _target(model, tokenizer)
    decoder = _decoder(target, draft, gamma, ngram_first)
    if max_len is None:
        max_len = max((len(encode(target, p)) for p in prompts), default=0) + max_new_tokens
    limits = Limits(max_new_tokens, max_len, tuple(stop_strings))
    done = decoder.complete(prompts, Sampling(temperature, top_k, top_p), limits, seed=seed, batch_size=batch_size)
    return done if return_completions else [c.text or "" for c in done]


def encode(target: Target, prompt: Prompt) -> tuple[int, ...]:
    """Prompt → token ids. Text gets the special tokens its tokenizer adds; the chat template writes its own."""
    if isinstance(prompt, str):
        return tuple(target.tokenizer(prompt)["input_ids"])
    if prompt and isinstance(prompt[0], dict):
        if not getattr(target.tokenizer, "chat_template", None):
            raise RecipeError(f"{target.name} has no chat template: pass text, or load the target with chat_template=PATH")
        text = target.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    return tuple(int(t) for t in prompt)  # type: ignore[arg-type]


def _target(model: Any, tokenizer: Any) -> Target:
    if isinstance(model, Target):
        return model
    if isinstance(model, str | os.PathLike):
        return Target.load(str(model))
    if tokenizer is None:
        raise RecipeError("generate: a transformers model needs its tokenizer: generate(model, tokenizer, prompts=[…])")
    return Target.from_model(model, tokenizer)


def _decoder(target: Target, draft: Draft, gamma: int, ngram_first: bool) -> SpeculativeDecoder:
    if draft is None or isinstance(draft, Drafter):
        return SpeculativeDecoder(target, draft, gamma=gamma)
    if draft == "ngram":
        return SpeculativeDecoder(target, NgramDrafter(), gamma=gamma)
    if not Path(draft).is_dir():
        raise RecipeError(f"generate: draft is {str(draft)!r}; it must be None, 'ngram', a checkpoint folder, or a Drafter")
    return SpeculativeDecoder.from_checkpoint(draft, target, gamma=gamma, ngram=ngram_first)


def _checkpoint(folder: Path) -> Path:
    """The folder itself, or a run folder's final checkpoint."""
    final = existing_folder(folder / "ckpt" / "final")
    return final if final.is_dir() else folder


def _template(folder: Path, meta: HeadMeta, given: str | os.PathLike[str] | None) -> str | None:
    """The given chat template, else the one of the recipe that the head was trained by."""
    if given is not None:
        return os.fspath(given)
    stored = (stored_recipe(folder, meta).get("target") or {}).get("chat_template")
    if stored is not None and not Path(stored).is_file():
        raise RecipeError(f"{folder} was trained with the chat template {stored}, which is not there; give its place: chat_template=PATH")
    return stored
