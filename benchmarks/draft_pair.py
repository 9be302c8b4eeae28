"""Section (d): a draft model that everybody has, made of the target itself: its first few layers, its own embedding, norm and lm_head.

    target's model ─► cut ─► (tune: learn the target's next-token distribution on the target's own answers, for some minutes) ─► both sides' draft

Untuned it drafts badly, which is all the same to a comparison: both sides draft with the same weights.

Shape suffixes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from contests import Bench, Block, Contender, contest, limits_for, pair_of, ratio, speed

from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Drafter
from draftheads.inference.drafters.draft_model import first_layers
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.packed import can_pack
from draftheads.inference.requests import Completion
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

# Draft lengths that both sides may choose from; transformers also its default (20 tokens, cut off by confidence).
GAMMAS = (1, 2, 4)
TUNE_PROMPTS, TUNE_TOKENS, TUNE_ROWS, TUNE_RATE = 96, 64, 8, 3e-4


@dataclass
class Pair:
    """short: the cut as a transformers model, drafter: the same weights as a drafter of ours."""

    short: Any
    drafter: Drafter
    layers: int
    tuned_steps: int

    @classmethod
    def make(cls, bench: Bench, layers: int, minutes: float) -> Pair:
        if not layers < bench.target.geometry.num_layers:
            raise RecipeError(f"--draft-layers {layers}: {bench.target.name} has {bench.target.geometry.num_layers} layers, a draft must have fewer")
        short = first_layers(bench.plain_model(), layers)
        short = copy.deepcopy(short) if minutes else short  # it shares the target's weights
        steps = tune(bench, short, minutes) if minutes else 0
        return cls(short, drafter_of(bench, short), layers, steps)

    def against_transformers(self, bench: Bench) -> dict[str, Any]:
        """Ours against assisted generation, each at its fastest draft length on other prompts."""
        sizes = bench.sizes
        trial: list[Block] = [[r] for r in bench.others(sizes.cost_prompts, sizes.tokens)[:3]]
        ours = fastest(bench, "(d) our draft length", {g: bench.ours(self.drafter, g) for g in GAMMAS}, trial)
        theirs = fastest(bench, "(d) transformers' draft length", {g: assisted(bench, self.short, g) for g in (*GAMMAS, 0)}, trial)
        blocks: list[Block] = [[r] for r in bench.held_out(max(2, sizes.prompts * 3 // 4), sizes.tokens)]
        contenders = {
            "draft_model": bench.ours(self.drafter, ours), "assisted_generation": assisted(bench, self.short, theirs),
            "none": bench.ours(NoDrafter()),
        }
        runs = contest(bench, "(d) draft model against assisted generation", contenders, blocks, sizes.tokens)
        base = runs.pop("none")
        return pair_of(runs, gamma={"draft_model": ours, "assisted_generation": theirs or "default"}, layers=self.layers,
                       tuned_steps=self.tuned_steps, speedup=ratio(speed(runs["draft_model"]), speed(base)))


def tune(bench: Bench, short: Any, minutes: float) -> int:
    """Distil the target into the cut for `minutes`, at most half of them spent on the target's answers. -> optimizer steps."""
    start = time.monotonic()
    requests = bench.others(TUNE_PROMPTS, TUNE_TOKENS)
    bench.progress.stage("(d) the target answers the tuning prompts", len(requests) * TUNE_TOKENS)
    rows: list[Completion] = []
    for i in range(0, len(requests), TUNE_ROWS):
        if rows and time.monotonic() - start > 30 * minutes:
            break
        part = requests[i : i + TUNE_ROWS]
        rows += complete(bench.target, NoDrafter(), part, limits=limits_for(part, TUNE_TOKENS), batch_size=len(part))
        bench.progress.advance(len(part) * TUNE_TOKENS)
    began, left = time.monotonic(), max(1.0, 60 * minutes - (time.monotonic() - start))
    bench.progress.stage("(d) tuning the cut", 1.0, "all")
    seen = 0.0

    def done(steps: int) -> float:
        nonlocal seen
        share = (time.monotonic() - began) / left
        bench.progress.advance(share - seen)
        seen = share
        return share

    steps = learn(short, bench.plain_model(), rows, done)
    bench.progress.finish()
    return steps


def learn(short: Any, model: Any, rows: Sequence[Completion], done: Callable[[int], float]) -> int:
    """KL to the target's distribution over the whole vocabulary at the answers' positions, one row a step, into the layers only (embedding,
    norm and lm_head stay the target's). done(steps): the share of the work that is done, 1 ends it; the learning rate falls with it."""
    device = next(short.parameters()).device
    layers = list(short.get_decoder().layers.parameters())
    for p in layers:
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(layers, TUNE_RATE, weight_decay=0.0)
    steps = 0
    while (share := done(steps)) < 1:
        row = rows[steps % len(rows)]
        ids_1T = torch.tensor([[*row.request.prompt_ids, *row.tokens]], device=device)
        first = len(row.request.prompt_ids) - 1
        with torch.no_grad():
            wanted_TV = model(ids_1T).logits[0, first:-1].float().log_softmax(-1)
        found_TV = short(ids_1T).logits[0, first:-1].float().log_softmax(-1)
        optimizer.param_groups[0]["lr"] = TUNE_RATE * max(0.05, 1 - share)
        F.kl_div(found_TV, wanted_TV, log_target=True, reduction="batchmean").backward()
        torch.nn.utils.clip_grad_norm_(layers, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
    short.requires_grad_(False)
    return steps


def drafter_of(bench: Bench, short: Any) -> Drafter:
    """The cut as a drafter of ours; its linears packed on a CPU, as the target's are."""
    from draftheads.inference.drafters.draft_model import DraftModelDrafter

    own = copy.deepcopy(short)
    pack = bench.target.device.type == "cpu" and bench.target.dtype == torch.float32 and can_pack()
    return DraftModelDrafter(Target.from_model(own, bench.target.tokenizer, name="cut", packed=pack), bench.target)


def assisted(bench: Bench, short: Any, gamma: int) -> Contender:
    """transformers' assisted generation with a constant draft length, 0: its defaults."""
    from transformers import GenerationConfig

    assistant = copy.copy(short)  # the draft length is the assistant's own setting
    assistant.generation_config = GenerationConfig() if not gamma else GenerationConfig(
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    return bench.transformers(assistant_model=assistant)


def fastest(bench: Bench, label: str, contenders: Mapping[int, Contender], blocks: Sequence[Block]) -> int:
    tokens = max(8, bench.sizes.tokens // 2)
    names = {str(gamma): gamma for gamma in contenders}
    runs = contest(bench, label, {name: contenders[gamma] for name, gamma in names.items()}, blocks, tokens)
    return names[max(runs, key=lambda name: speed(runs[name]).per_s or 0.0)]
