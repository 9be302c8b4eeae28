"""Section (b): do rounds cost what their parts cost? Parts first, on other prompts; then the run they predict.

    other prompts ─► v(w), c, o per prompt (inference/measure.py) ─► medians ─┐
    held-out prompts ─► contest of none and the drafters ─► rounds, seconds ──┴► achieved / allowed = efficiency

Allowed is Σ tokens / Σ (γ·c + v(γ+1) + o) over the contest's own rounds (eval/cost_model.py), so that acceptance is the same on both sides
and only what time was lost shows. The interval resamples both: the prompts of the contest and those of the micro-benchmark.

Shape suffixes: P prompts of the contest, K resamples of the costs, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from contests import Bench, contest, figure, ratio, speed, tau

from draftheads.eval.cost_model import Costs
from draftheads.eval.stats import Interval
from draftheads.inference import measure
from draftheads.inference.drafters.base import Drafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.measure import Timed
from draftheads.inference.requests import Request

# Verify widths (3 and 9 are what the contests meet: v is not monotone, so that interpolating there would bias the prediction), and the draft
# lengths at which each drafter's step is timed.
WIDTHS, STEPS = (1, 2, 3, 4, 8, 9, 16), {"ngram": (1, 8), "head": (1, 4, 8), "draft_model": (1, 3, 6)}
V_MOST, O_MOST, EFFICIENCY = {4: 1.25, 8: 1.5}, 0.05, 0.95
RESAMPLES, COST_RESAMPLES = 2000, 200


def cost_model(bench: Bench, drafters: Mapping[str, tuple[Drafter, int]]) -> dict[str, Any]:
    """{"verify_cost", "draft_cost", "overhead", "efficiency"}; drafters: name → (drafter, γ of the contest)."""
    costs = sample(bench, {name: drafter for name, (drafter, _) in drafters.items()}, bench.others(bench.sizes.cost_prompts, 256))
    blocks = [[r] for r in bench.held_out(bench.sizes.prompts, bench.sizes.tokens)]
    contenders = {"none": bench.ours(NoDrafter()), **{name: bench.ours(drafter, gamma) for name, (drafter, gamma) in drafters.items()}}
    runs = contest(bench, "(b) drafters against none", contenders, blocks, bench.sizes.tokens)
    reached = {name: {**efficiency(costs, runs["none"], runs[name]), "gamma": gamma, "tau": tau(runs[name]).per_s,
                      "speedup": ratio(speed(runs[name]), speed(runs["none"]))} for name, (_, gamma) in drafters.items()}
    return {
        "verify_cost": verify_costs(costs), "draft_cost": {name: over([k.c[name] for k in costs]) for name in drafters},
        "overhead": worst({name: over([k.o[name] for k in costs], at_most=O_MOST) for name in drafters}, max),
        "efficiency": worst(reached, min),
    }


def sample(bench: Bench, drafters: Mapping[str, Drafter], requests: Sequence[Request]) -> list[Costs]:
    """One Costs per prompt of the micro-benchmark; prompts are not pooled, so that a long one's slower steps are only compared with its own."""
    sizes = bench.sizes
    timed = {name: (drafter, STEPS.get(name, (1, 4, 8))) for name, drafter in drafters.items()}
    passes = len(WIDTHS) + sum(len(gammas) for _, gammas in timed.values())
    fillers = [w - 1 for w in WIDTHS if w > 1]
    measure.sample_costs(bench.target, timed, requests[:1], fillers=fillers, rounds=2, repeats=1)
    bench.progress.stage("(b) costs of verifying and drafting", passes * sizes.cost_repeats * len(requests), "passes")
    found = []
    for request in requests:
        samples = measure.sample_costs(bench.target, timed, [request], fillers=fillers, rounds=sizes.cost_rounds,
                                       repeats=sizes.cost_repeats, on_pass=lambda: bench.progress.advance(1))
        found.append(Costs.from_json(measure.fit_costs(samples)))
    bench.progress.finish()
    return found


def verify_costs(costs: Sequence[Costs], most: Mapping[int, float] = V_MOST) -> dict[str, Any]:
    """Relative to our own w = 1; `steps` counts whole autoregressive steps instead, as the cost model does."""
    by_width = {}
    for w in WIDTHS:
        steps = over([k.verify(w) for k in costs])["value"]
        by_width[str(w)] = over([k.verify(w) / k.verify(1) for k in costs], at_most=most.get(w), steps=steps)
    step_ms = 1e3 * float(np.median([k.t_ar_s for k in costs]))
    return {"by_width": by_width, "met": all(f.get("met", True) for f in by_width.values()), "step_ms": step_ms}


def over(values: Sequence[float], **more: Any) -> dict[str, Any]:
    """The median of one value a prompt, with its bootstrap interval."""
    values_P = np.array(values)
    interval = Interval(float(np.median(values_P)))
    if len(values_P) > 1:
        chosen_RP = np.random.default_rng(0).integers(0, len(values_P), (RESAMPLES, len(values_P)))
        medians_R = np.median(values_P[chosen_RP], axis=1)
        interval = Interval(interval.value, *(float(q) for q in np.quantile(medians_R, [0.025, 0.975])))
    return figure(interval, len(values_P), **more)


def middle(costs: Sequence[Costs]) -> Costs:
    """The median of every part."""
    return Costs(
        float(np.median([k.t_ar_s for k in costs])), tuple(np.median([k.v for k in costs], axis=0).tolist()),
        {name: float(np.median([k.c[name] for k in costs])) for name in costs[0].c},
        {name: float(np.median([k.o[name] for k in costs])) for name in costs[0].o}, costs[0].widths,
    )


def efficiency(costs: Sequence[Costs], base: Sequence[Timed], runs: Sequence[Timed]) -> dict[str, Any]:
    """Achieved speed-up over the allowed one. The drafter's tokens cancel: what is left is the rounds' predicted seconds over their real ones."""
    rng = np.random.default_rng(0)
    n = len(costs)
    chosen = [middle(costs), *(middle([costs[i] for i in rng.integers(0, n, n)]) for _ in range(COST_RESAMPLES if n > 1 else 0))]
    steps_KP = np.array([[predicted_steps(k, run) for run in runs] for k in chosen])
    seconds_P, base_s_P = np.array([r.decode_s for r in runs]), np.array([r.decode_s for r in base])
    base_tokens_P = np.array([r.decode_tokens for r in base])

    def value(steps_P: np.ndarray, weights_P: np.ndarray) -> float:
        return float((weights_P @ steps_P) * (weights_P @ base_s_P) / (weights_P @ base_tokens_P) / (weights_P @ seconds_P))

    whole = value(steps_KP[0], np.ones(len(runs)))
    if len(runs) < 2:
        return figure(Interval(whole), len(runs), at_least=EFFICIENCY)
    weights_RP = rng.multinomial(len(runs), np.full(len(runs), 1 / len(runs)), size=RESAMPLES)
    values = [value(steps_KP[r % len(chosen)], weights) for r, weights in enumerate(weights_RP)]
    low, high = np.quantile(values, [0.025, 0.975])
    return figure(Interval(whole, float(low), float(high)), len(runs), at_least=EFFICIENCY)


def predicted_steps(costs: Costs, run: Timed) -> float:
    """Seconds of the run's rounds as the cost model has them, in autoregressive steps."""
    return sum(costs.round(r.source, r.drafted) for c in run.completions for r in c.rounds)


def worst(figures: Mapping[str, dict[str, Any]], choose: Callable[..., str]) -> dict[str, Any]:
    """The worst drafter's figure on top, all of them under it."""
    if not figures:
        return {"value": None, "interval": None, "n": 0, "by_drafter": {}}
    name = choose(figures, key=lambda n: figures[n]["value"])
    top: dict[str, Any] = {key: figures[name][key] for key in ("value", "interval", "n", "wanted", "met") if key in figures[name]}
    return {**top, "drafter": name, "by_drafter": dict(figures)}
