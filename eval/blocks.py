"""The timed runs: blocks of prompts, each decoded by every contender before the next one begins.

    prompts ─► blocks of one category, categories taking turns ─► contenders in rotating order ─► Timed each ─► outputs compared ─► Block
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from draftheads.eval.lossless import IDENTICAL, Divergence, compare, target_logits
from draftheads.eval.records import TRANSFORMERS, Block, Journal
from draftheads.eval.subject import Prompt
from draftheads.eval.work import Evaluation
from draftheads.inference import measure
from draftheads.inference.processors import wanted as wanted_history


def plan_blocks(work: Evaluation) -> list[list[Prompt]]:
    """Blocks of `batch_size` prompts of one category; categories take turns, so that drift meets all of them alike."""
    by_category: dict[str, list[Prompt]] = {}
    for p in work.prompts:
        by_category.setdefault(p.category, []).append(p)
    size = work.section.batch_size
    split = [[prompts[i : i + size] for i in range(0, len(prompts), size)] for prompts in by_category.values()]
    return [blocks[i] for i in range(max(map(len, split))) for blocks in split if i < len(blocks)]


def also_transformers(categories: Sequence[str], fraction: float) -> set[int]:
    """Indices of the blocks that transformers runs too: round(count · fraction), spread over the categories and inside each of them. (Every
    n-th block would be one category only where their number is a multiple of n.)"""
    count = len(categories)
    by_category = sorted(range(count), key=lambda i: categories[i])
    chosen = round(count * fraction) if fraction >= 1 or count * fraction >= 1 else int(fraction > 0)
    return {by_category[int(i * count / chosen)] for i in range(chosen)}


def run_blocks(work: Evaluation, journal: Journal, blocks: dict[int, Block]) -> None:
    plan = plan_blocks(work)
    shared = also_transformers([block[0].category for block in plan], work.section.transformers_fraction)
    missing = [i for i in range(len(plan)) if i not in blocks]
    if not missing:
        return
    if shared & set(missing):
        work.progress.stage("loading the target once more for transformers' generate", 1, "models")
        work.plain = measure.plain_model(work.target, trust_remote_code=work.checkpoint.recipe.target.trust_remote_code)
        work.progress.finish()
    work.warm_up()
    work.forget(blocks[i] for i in sorted(blocks))
    names = list(work.drafters)
    share = work.section.max_new_tokens
    work.progress.stage("timed runs, all drafters interleaved", sum(len(plan[i]) * share * (len(names) + (i in shared)) for i in missing))
    with no_collection():
        for i in missing:
            block = run_block(work, i, plan[i], [*names, *([TRANSFORMERS] if i in shared else [])])
            blocks[i] = block
            journal.append("block", block.to_json())
    work.progress.finish()
    work.plain = None


@contextmanager
def no_collection() -> Iterator[None]:
    """A garbage collection inside a run would be charged to whoever is running (with transformers loaded it takes a second). What lives
    now is frozen, and the little that piles up is collected between the runs."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def run_block(work: Evaluation, index: int, prompts: list[Prompt], contenders: list[str]) -> Block:
    block = Block(index, prompts[0].category, [p.id for p in prompts], [len(p.ids) for p in prompts])
    for name in measure.rotation(contenders, index):
        written = 0

        def count(r: Any) -> None:
            nonlocal written
            new = sum(map(len, r.new_tokens.values()))
            written += new
            work.progress.advance(new)

        gc.collect()
        if name == TRANSFORMERS:
            timed = work.generate(prompts, work.limits())
        else:
            timed = work.decode(name, prompts, work.gamma.get(name, {}), work.limits(), batch_size=len(prompts), on_round=count)
        work.progress.advance(len(prompts) * work.section.max_new_tokens - written)
        block.runs[name] = timed
    if work.sampling.temperature == 0:
        block.differences = differences(work, block, prompts)
    return block


def differences(work: Evaluation, block: Block, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Greedy: none against every drafter, and transformers (where it ran) against all of ours."""
    # In transformers a processor of the history sees the padding of the shorter prompts, too: there it would be another one.
    padded = wanted_history(work.sampling) and len({len(p.ids) for p in prompts}) > 1
    pairs = [(a, b) for a in ((TRANSFORMERS, "none") if not padded else ("none",)) for b in work.drafters if a in block.runs and a != b]
    tokens = {name: [c.tokens for c in timed.completions] for name, timed in block.runs.items()}
    return [difference(work, prompt, f"{a}/{b}", tokens[a][row], tokens[b][row]) for row, prompt in enumerate(prompts) for a, b in pairs]


def difference(work: Evaluation, prompt: Prompt, pair: str, expected: Sequence[int], got: Sequence[int]) -> dict[str, Any]:
    """lossless.compare of two outputs of one prompt, with what the report shows beside it."""
    result: Divergence = compare(expected, got, target_logits(work.target, prompt.ids, work.sampling), work.dtype)
    item = {"id": prompt.id, "category": prompt.category, "pair": pair, **result.to_json()}
    if result.verdict == IDENTICAL:
        return item
    texts = {f"{key}_text": None if (t := item[key]) is None else work.target.tokenizer.decode([t]) for key in ("expected", "found")}
    return item | texts
