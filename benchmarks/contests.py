"""Paired contests: the same prompts, block by block, every contender on a block before the next one begins, in rotating order.

    Bench (target, transformers' own model, prompts) ─► contest ─► {contender: [Timed per block]} ─► figures {value, interval, n}

A figure's interval is the 95 % bootstrap over blocks (eval/stats.py); at batch 1 a block is a prompt.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftheads.data.conversations import Conversation
from draftheads.data.select import read_prompts
from draftheads.eval.blocks import no_collection
from draftheads.eval.progress import Progress
from draftheads.eval.stats import Interval, Throughput, ratio_interval
from draftheads.eval.subject import render_prompts, request
from draftheads.inference import measure
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.measure import Timed
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

Block = Sequence[Request]
Contender = Callable[[Block, Limits], Timed]

# Longest n-gram that is looked up, the shortest is 1: transformers' max_matching_ngram_size means the same.
LOOKUP = 5


@dataclass(frozen=True)
class Sizes:
    """How much is measured. tokens: new ones a prompt; cost_*: the micro-benchmark, `repeats` passes of `rounds` rounds a prompt."""

    prompts: int = 16
    tokens: int = 64
    copy_prompts: int = 12
    copy_tokens: int = 96
    cost_prompts: int = 6
    cost_rounds: int = 8
    cost_repeats: int = 2
    batch_prompts: int = 32
    batch_tokens: int = 32


FULL = Sizes()
# The copy-heavy set stays whole: its τ is the same in every run.
QUICK = Sizes(prompts=4, tokens=24, cost_prompts=2, cost_rounds=6, cost_repeats=1, batch_prompts=8, batch_tokens=12)


@dataclass
class Bench:
    """What all sections share. plain: transformers' own model of the same weights, in its own attention, loaded when first needed."""

    target: Target
    sizes: Sizes
    progress: Progress
    plain: Any = None
    identical: dict[str, list[int]] = field(default_factory=dict)  # contest → [prompts with equal tokens from all contenders, prompts]

    def requests(self, conversations: Sequence[Conversation], tokens: int) -> list[Request]:
        return [request(p, 0) for p in render_prompts(self.target, conversations, tokens + 16)]

    def held_out(self, count: int, tokens: int) -> list[Request]:
        """The evaluation's own prompts, categories in turn."""
        return self.requests(_builtin("draftheads.eval.prompts", count), tokens)

    def others(self, count: int, tokens: int) -> list[Request]:
        """For everything that is measured beforehand: none of them is in a contest."""
        return self.requests(_builtin("draftheads.data.prompts", count), tokens)

    def plain_model(self) -> Any:
        if self.plain is None:
            self.plain = measure.plain_model(self.target)
        return self.plain

    def ours(self, drafter: Drafter, gamma: int = 1, **options: Any) -> Contender:
        """A contender: decode() with this drafter and draft length, the block's rows together."""
        def run(block: Block, limits: Limits) -> Timed:
            return measure.timed_decode(self.target, drafter, block, Sampling(), limits, plan=Plan(gamma=gamma), batch_size=len(block), **options)

        return run

    def transformers(self, **options: Any) -> Contender:
        """A contender: transformers' generate, greedy, with these options of its own."""
        model = self.plain_model()
        tokenizer, eos = self.target.tokenizer, sorted(self.target.eos_ids)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]

        def run(block: Block, limits: Limits) -> Timed:
            return measure.timed_generate(model, block, Sampling(), limits, eos_ids=eos, pad_id=pad, **options)

        return run


def contest(bench: Bench, label: str, contenders: Mapping[str, Contender], blocks: Sequence[Block], tokens: int) -> dict[str, list[Timed]]:
    """Everybody once per block, interleaved. What runs first of its kind (lazy kernels, thread pools) is a warm-up that does not count."""
    limits = limits_for([r for block in blocks for r in block], tokens)
    short = Limits(min(8, tokens), limits.max_len)
    for run in contenders.values():
        run(blocks[0], short)
    share = tokens * sum(map(len, blocks))
    bench.progress.stage(label, share * len(contenders))
    results: dict[str, list[Timed]] = {name: [] for name in contenders}
    with no_collection():
        for i, block in enumerate(blocks):
            for name in measure.rotation(list(contenders), i):
                gc.collect()
                results[name].append(_checked(contenders[name](block, limits)))
                bench.progress.advance(tokens * len(block))
    bench.progress.finish()
    same = total = 0
    for answers in zip(*results.values(), strict=True):
        for rows in zip(*(a.completions for a in answers), strict=True):
            total, same = total + 1, same + all(row.tokens == rows[0].tokens for row in rows)
    bench.identical[label] = [same, total]
    return results


def _checked(timed: Timed) -> Timed:
    failed = next((c for c in timed.completions if c.finish_reason == "error"), None)
    if failed is not None:
        raise RecipeError(f"prompt {failed.request.id} cannot be decoded: {failed.error}")
    return timed


def limits_for(requests: Sequence[Request], tokens: int) -> Limits:
    return Limits(tokens, max(len(r.prompt_ids) for r in requests) + tokens + 16)


def _builtin(package: str, count: int) -> list[Conversation]:
    return read_prompts("builtin", limit=count, builtin=package)[0]


# ---- figures


def figure(interval: Interval, n: int, *, at_least: float | None = None, at_most: float | None = None, **more: Any) -> dict[str, Any]:
    """{"value", "interval", "n"}, with what is wanted and whether the value meets it."""
    found: dict[str, Any] = {"value": interval.value, "interval": interval.pair, "n": n, **more}
    if interval.value is not None and at_least is not None:
        found |= {"wanted": f">= {at_least:g}", "met": interval.value >= at_least}
    if interval.value is not None and at_most is not None:
        found |= {"wanted": f"<= {at_most:g}", "met": interval.value <= at_most}
    return found


def speed(runs: Sequence[Timed]) -> Throughput:
    return Throughput([r.decode_tokens for r in runs], [r.decode_s for r in runs])


def tau(runs: Sequence[Timed]) -> Throughput:
    """Tokens per target forward, the bonus token included (inference/metrics.py), as a throughput whose clock counts forwards."""
    return Throughput([r.decode_tokens for r in runs], [r.forwards for r in runs])


def ratio(top: Throughput, bottom: Throughput, **wanted: Any) -> dict[str, Any]:
    return figure(ratio_interval(top, bottom), len(top.tokens), **wanted)


# ---- sections


def autoregressive(bench: Bench) -> dict[str, Any]:
    """(a) Our autoregressive path against transformers' generate, decode only."""
    blocks = [[r] for r in bench.held_out(bench.sizes.prompts, bench.sizes.tokens)]
    contenders = {"none": bench.ours(NoDrafter()), "generate": bench.transformers()}
    runs = contest(bench, "(a) none against generate", contenders, blocks, bench.sizes.tokens)
    ours, theirs = speed(runs["none"]), speed(runs["generate"])
    each = [a.decode_tokens / a.decode_s * b.decode_s / b.decode_tokens for a, b in zip(*runs.values(), strict=True) if a.decode_tokens]
    return ratio(ours, theirs, at_least=1.2, lowest=min(each, default=None), tokens_per_s={"none": ours.per_s, "generate": theirs.per_s})


def lookup(bench: Bench, gamma: int) -> dict[str, Any]:
    """(c) n-gram drafts against transformers' prompt lookup, on prompts whose answers copy; the same γ and the same n-gram sizes."""
    from prompts_decode import copy_heavy

    blocks = [[r] for r in bench.requests(copy_heavy()[: bench.sizes.copy_prompts], bench.sizes.copy_tokens)]
    contenders = {
        "ngram": bench.ours(NgramDrafter(1, LOOKUP), gamma),
        "prompt_lookup": bench.transformers(prompt_lookup_num_tokens=gamma, max_matching_ngram_size=LOOKUP),
    }
    runs = contest(bench, "(c) n-gram against prompt lookup", contenders, blocks, bench.sizes.copy_tokens)
    return pair_of(runs, tau_wanted=1.0, gamma=gamma, max_ngram=LOOKUP)


def pair_of(runs: Mapping[str, Sequence[Timed]], *, tau_wanted: float | None = None, **more: Any) -> dict[str, Any]:
    """Ours (first) against theirs: tokens/s and τ, as ratios and on their own."""
    (our_name, ours), (their_name, theirs) = runs.items()
    return {
        "tokens_per_s": ratio(speed(ours), speed(theirs), at_least=1.0), "tau": ratio(tau(ours), tau(theirs), at_least=tau_wanted),
        our_name: {"tokens_per_s": speed(ours).per_s, "tau": tau(ours).per_s},
        their_name: {"tokens_per_s": speed(theirs).per_s, "tau": tau(theirs).per_s}, **more,
    }


def by_batch(bench: Bench, drafters: Mapping[str, tuple[Drafter, int]], batches: Sequence[int]) -> dict[str, Any]:
    """(e) Tokens/s of every drafter at every batch size, speed-up over none at the same batch, and where it falls below 1."""
    requests = bench.held_out(bench.sizes.batch_prompts, bench.sizes.batch_tokens)
    curves: dict[str, dict[str, Any]] = {"none": {}, **{name: {} for name in drafters}}
    for batch in batches:
        blocks = [requests[i : i + batch] for i in range(0, len(requests) - batch + 1, batch)]
        if not blocks:
            raise RecipeError(f"--batches {batch}: there are {len(requests)} prompts here; ask for at most that many")
        contenders = {"none": bench.ours(NoDrafter()), **{name: bench.ours(drafter, gamma) for name, (drafter, gamma) in drafters.items()}}
        runs = contest(bench, f"(e) batch {batch}", contenders, blocks, bench.sizes.batch_tokens)
        base = speed(runs["none"])
        for name in curves:
            own = speed(runs[name])
            curves[name][str(batch)] = {"tokens_per_s": own.per_s} | ({} if name == "none" else {"speedup": ratio(own, base)})
    speedups = {name: {int(b): at["speedup"]["value"] for b, at in curve.items()} for name, curve in curves.items() if name != "none"}
    return {
        "batches": list(batches), "gamma": {name: gamma for name, (_, gamma) in drafters.items()}, "curves": curves,
        "break_even": {name: break_even(points) for name, points in speedups.items()},
    }


def break_even(speedup_at: Mapping[int, float]) -> float | None:
    """The batch at which the speed-up falls to 1, interpolated between measured ones; None where it stays above."""
    points = sorted(speedup_at.items())
    for (low, above), (high, below) in zip(points, points[1:], strict=False):
        if above >= 1 > below:
            return low + (high - low) * (above - 1) / (above - below)
    return float(points[0][0]) if points and points[0][1] < 1 else None
