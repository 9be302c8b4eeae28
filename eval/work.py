"""One evaluation in progress: who decodes what, with which limits. Everything that decodes goes through here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from draftheads.eval import subject
from draftheads.eval.progress import Progress
from draftheads.eval.records import Block
from draftheads.eval.subject import Checkpoint, Prompt
from draftheads.inference import measure
from draftheads.inference.drafters.base import Drafter
from draftheads.inference.drafters.suffix import SuffixDrafter
from draftheads.inference.measure import Timed
from draftheads.inference.requests import Limits, Request, Round, Sampling
from draftheads.inference.shapes import Shape, parse_shape
from draftheads.inference.target import Target
from draftheads.recipes.schema import EvalSection, RecipeError

# Slots behind prompt and answer that a round may write beyond the end, and how many rows untimed runs decode together.
SPARE, UNTIMED_BATCH = 16, 16


@dataclass
class Evaluation:
    """gamma: {drafter: {source: draft length}} of the timed runs, once chosen. plain: transformers' own model, while it is needed. decoded: whether
    anything was decoded in this process."""

    checkpoint: Checkpoint
    section: EvalSection
    target: Target
    drafters: dict[str, Drafter]
    prompts: list[Prompt]
    calibration: list[Prompt]
    progress: Progress
    gamma: dict[str, dict[str, int]] = field(default_factory=dict)
    plain: Any = None
    decoded: bool = False

    @property
    def sampling(self) -> Sampling:
        return subject.sampling(self.section)

    @cached_property
    def tree(self) -> Shape | None:
        return parse_shape(self.section.tree)

    def sources(self, name: str) -> list[str]:
        """The sources of a drafter whose draft length can be chosen; the others grow the tree."""
        return [p.name for p in subject.parts(self.drafters[name]) if p.name != "none" and subject.has_length(p.name, self.tree)]

    @property
    def grown_by(self) -> list[str]:
        """Drafters of which a part grows the tree."""
        return [n for n, d in self.drafters.items() if n != "none" and len(self.sources(n)) < len(subject.parts(d))]

    def limits(self, max_new_tokens: int | None = None, *, prompts: Sequence[Prompt] = ()) -> Limits:
        """The same cache length for all timed runs; `prompts` for others than the evaluation's."""
        new = max_new_tokens or self.section.max_new_tokens
        longest = max(len(p.ids) for p in prompts or [*self.prompts, *self.calibration])
        return Limits(max_new_tokens=new, max_len=min(longest + new + SPARE, self.target.geometry.max_positions),
                      ignore_eos=self.section.ignore_eos)

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    def requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        return [subject.request(p, self.section.seed) for p in prompts]

    def decode(
        self, name: str, prompts: Sequence[Prompt], gamma: dict[str, int], limits: Limits, *, batch_size: int,
        on_round: Callable[[Round], None] | None = None, certificate: bool = False,
    ) -> Timed:
        """Drafter `name` on these prompts, with these draft lengths (a source without one grows eval.tree). RecipeError
        for a prompt that cannot be decoded."""
        drafter, self.decoded = self.drafters[name], True
        plan = subject.make_plan(drafter, gamma, self.tree)
        timed = measure.timed_decode(self.target, drafter, self.requests(prompts), self.sampling, limits, plan=plan, batch_size=batch_size,
                                     on_round=on_round, certificate=certificate)
        failed = next((c for c in timed.completions if c.finish_reason == "error"), None)
        if failed is not None:
            raise RecipeError(f"prompt {failed.request.id} cannot be decoded: {failed.error}")
        return timed

    def decode_untimed(self, name: str, prompts: Sequence[Prompt], gamma: dict[str, int], limits: Limits, *, certificate: bool = False) -> Timed:
        """Several rows together, for acceptance only."""
        return self.decode(name, prompts, gamma, limits, batch_size=min(UNTIMED_BATCH, len(prompts)), certificate=certificate,
                           on_round=lambda r: self.progress.advance(sum(map(len, r.new_tokens.values()))))

    def generate(self, prompts: Sequence[Prompt], limits: Limits) -> Timed:
        """transformers' generate on these prompts."""
        tokenizer = self.target.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.target.eos_ids, default=0)
        s = self.sampling
        off = Sampling()
        names = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", *(("min_p",) if s.temperature > 0 else ()))
        return measure.timed_generate(self.plain, self.requests(prompts), s, limits, eos_ids=sorted(self.target.eos_ids), pad_id=pad,
                                      **{n: getattr(s, n) for n in names if getattr(s, n) != getattr(off, n)})

    def warm_up(self) -> None:
        """Caches, thread pools and lazily built kernels: nothing timed may be the first of its kind."""
        first = self.calibration[: self.section.batch_size]
        # As long a cache as the timed runs have: CUDA graphs belong to it, and to every width it takes some rounds until they are captured.
        limits = replace(self.limits(), max_new_tokens=min(24 if self.target.device.type == "cuda" else 8, self.section.max_new_tokens))
        for name in self.drafters:
            gamma = self.gamma.get(name) or dict.fromkeys(self.sources(name), 4)
            self.decode(name, first, gamma, limits, batch_size=len(first))
        if self.plain is not None:
            self.generate(first, limits)

    def forget(self, blocks: Iterable[Block] = ()) -> None:
        """Empty the stores of suffix drafters, then put into each what it wrote in these blocks: a store may know earlier prompts' answers, and a
        resumed run's what it would have known, but never an answer that is about to be measured."""
        ids = {p.id: p.ids for p in self.prompts}
        for name, drafter in self.drafters.items():
            for part in subject.parts(drafter):
                if isinstance(part, SuffixDrafter):
                    part.forget()
                    for c in (c for b in blocks if name in b.runs for c in b.runs[name].completions):
                        part.remember(ids[c.request.id], c.tokens)
