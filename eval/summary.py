"""From the records of a run to the report: every figure is computed here, once, from blocks; the renderers only print.

    blocks ─► metrics per drafter, and per drafter and category ─► checks ─► report (a dict that eval/report/schema.json describes)
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftheads.eval.advice import advise
from draftheads.eval.cost_model import Costs, predict
from draftheads.eval.lossless import IDENTICAL, MAX_Z, TIE, UNEXPLAINED
from draftheads.eval.records import TRANSFORMERS, Block
from draftheads.eval.stats import Throughput, ratio_interval
from draftheads.eval.verdict import verdict
from draftheads.inference import metrics
from draftheads.inference.requests import Completion, RoundStat

SCHEMA_VERSION = 1
# A speed-up above τ is impossible at batch 1: a round costs at least one step. This much is left to the clock.
SPEED_LIMIT = 1.02
# A bootstrap over a handful of prompts gives too narrow an interval to accuse anybody.
FEWEST_PROMPTS = 6
UNDER_TEST = ("composite", "head", "mtp", "draft_model", "suffix", "ngram", "none")
RULE = (
    "Greedy: outputs are compared token by token with drafter none's, and on their share of the prompts with transformers' generate. A first "
    "difference at which both tokens' logits, recomputed by one plain forward, are within the bound of the top logit (1e-3 in fp32) is a tie; "
    "any other is unexplained. Sampling: |z| of the martingale Σ(log p + H)/√ΣVar must stay within 4."
)
LOSSY_RULE = " Accepted was by a lossy rule, which is exact at temperature 0 only: with sampling z is shown, and nothing is claimed."


@dataclass
class Evidence:
    """Everything a report is made of. untimed: completions at tau_gamma per drafter; untimed_differences: between these and none's.
    gamma: {drafter: {source: γ}} of the timed runs. lossy, drafting, tuned: as in the report's schema.
    rounds_ran: CUDA graphs, or eagerly and why."""

    blocks: list[Block]
    drafters: list[str]
    gamma: dict[str, dict[str, int]]
    tau_gamma: int
    setting: dict[str, Any]  # temperature, batch_size, device, dtype
    untimed: dict[str, list[Completion]] = field(default_factory=dict)
    untimed_differences: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    costs: Costs | None = None
    gamma_chosen: str = "given"
    predicted: dict[str, float] = field(default_factory=dict)
    gamma_table: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    expected: dict[str, Any] | None = None
    bootstrap: int = 2000
    seed: int = 0
    lossy: dict[str, Any] | None = None
    drafting: dict[str, Any] = field(default_factory=dict)
    rounds_ran: str = ""
    tuned: dict[str, Any] | None = None

    @property
    def under_test(self) -> str:
        return next(name for name in UNDER_TEST if name in self.drafters)


def build_report(
    evidence: Evidence, *, settings: dict[str, Any], provenance: dict[str, Any], trace: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The whole report. `ok` false (a divergence is unexplained, or the speed-up is impossible) makes the command end with 1."""
    categories = list(dict.fromkeys(b.category for b in evidence.blocks))
    by_drafter = {}
    for name in evidence.drafters:
        split = {c: metric_set(evidence, name, [b for b in evidence.blocks if b.category == c]) for c in categories}
        by_drafter[name] = {**metric_set(evidence, name, evidence.blocks), "by_category": split}
    tested = evidence.under_test
    summary = {k: v for k, v in by_drafter[tested].items() if k != "by_category"}
    advice = {c: advise({n: d["by_category"][c] for n, d in by_drafter.items()}) for c in categories}
    advice["all"] = advise(by_drafter)
    losslessness = _losslessness(evidence)
    problems = find_problems(by_drafter, losslessness, evidence.setting["batch_size"], lossy=evidence.lossy is not None)
    report = {
        "schema_version": SCHEMA_VERSION, "kind": "draftheads-eval", "ok": not problems, "problems": problems, "verdict": "", "drafter": tested,
        "lossy": evidence.lossy, "drafting": {"tree": None, "grown_by": [], "copy_first": "ngram", "draft_model": None} | evidence.drafting,
        "tuned": evidence.tuned, "summary": summary, "by_category": by_drafter[tested]["by_category"], "by_drafter": by_drafter,
        "at_tau_gamma": _at_tau_gamma(evidence), "expected": _expected(evidence), "cost_model": _cost_model(evidence, by_drafter),
        "advice": advice, "losslessness": losslessness, "trace": trace or [], "definitions": definitions(), "settings": settings,
        "provenance": provenance,
    }
    report["verdict"] = verdict(report)
    return plain(report)


def acceptance(completions: Sequence[Completion]) -> dict[str, Any]:
    """The acceptance part of a metric set, by inference/metrics.py."""
    rounds = metrics.all_rounds(completions)
    return {
        "tau": metrics.tau(rounds), "tau_macro": metrics.tau_macro(completions), "tau_untrimmed": metrics.tau_untrimmed(rounds),
        "tau_without_loops": metrics.tau([r for c in completions for r in metrics.without_loop(c)]),
        "acceptance_rate": metrics.acceptance_rate(rounds), "acceptance_per_position": metrics.acceptance_per_position(rounds),
        "conditional_acceptance": metrics.conditional_acceptance(rounds), "drafted": sum(r.drafted for r in rounds),
        "accepted": sum(r.accepted for r in rounds), "rounds": len(rounds), "tokens": sum(r.emitted for r in rounds),
        "prompts": len(completions),
    }


def metric_set(evidence: Evidence, drafter: str, blocks: Sequence[Block]) -> dict[str, Any]:
    """All figures of one drafter over these blocks."""
    blocks = [b for b in blocks if drafter in b.runs]
    shared = [b for b in blocks if TRANSFORMERS in b.runs]
    own = throughput(blocks, drafter)
    base = throughput(blocks, "none") if all("none" in b.runs for b in blocks) else Throughput((), ())
    speed = _ratio(own, base, evidence)
    ours, theirs = throughput(shared, drafter), throughput(shared, TRANSFORMERS)
    against = _ratio(ours, theirs, evidence)
    base_shared = throughput(shared, "none") if all("none" in b.runs for b in shared) else Throughput((), ())
    return {
        **acceptance([c for b in blocks for c in b.runs[drafter].completions]),
        "speedup": speed.value, "speedup_ci95": speed.pair, "speedup_vs_transformers": against.value,
        "speedup_vs_transformers_ci95": against.pair, "tokens_per_s": own.per_s, "baseline_tokens_per_s": base.per_s,
        "transformers_tokens_per_s": theirs.per_s, "baseline_vs_transformers": _ratio(base_shared, theirs, evidence).value,
        "lossless": lossless(evidence, drafter, blocks), "gamma": evidence.gamma.get(drafter, {}),
        "tree": evidence.drafting.get("tree") if drafter in evidence.drafting.get("grown_by", ()) else None, **evidence.setting,
    }


def throughput(blocks: Iterable[Block], contender: str) -> Throughput:
    runs = [b.runs[contender] for b in blocks]
    return Throughput([r.decode_tokens for r in runs], [r.decode_s for r in runs])


def _ratio(top: Throughput, bottom: Throughput, evidence: Evidence) -> Any:
    if len(top.tokens) != len(bottom.tokens):
        bottom = Throughput([0] * len(top.tokens), [0] * len(top.tokens))
    return ratio_interval(top, bottom, samples=evidence.bootstrap, seed=evidence.seed)


def lossless(evidence: Evidence, drafter: str, blocks: Sequence[Block]) -> bool | None:
    """None when nothing was compared (drafter none alone, or sampling without a certificate), or nothing is claimed (sampling by a lossy rule)."""
    if evidence.setting["temperature"] > 0:
        if evidence.lossy is not None:
            return None
        z = metrics.martingale_z(evidence.untimed.get(drafter, []))
        return None if math.isnan(z) else abs(z) <= MAX_Z
    ids = {i for b in blocks for i in b.ids}
    found = [d for b in blocks for d in b.differences if d["pair"].endswith("/" + drafter)] + evidence.untimed_differences.get(drafter, [])
    verdicts = [d["verdict"] for d in found if d["id"] in ids]
    return all(v != UNEXPLAINED for v in verdicts) if verdicts else None


def _losslessness(evidence: Evidence) -> dict[str, Any]:
    pairs: dict[str, dict[str, int]] = {}
    listed = []
    untimed = [d for found in evidence.untimed_differences.values() for d in found]
    for d in [*(d for b in evidence.blocks for d in b.differences), *untimed]:
        pairs.setdefault(d["pair"], {IDENTICAL: 0, TIE: 0, UNEXPLAINED: 0})[d["verdict"]] += 1
        if d["verdict"] != IDENTICAL:
            listed.append(d)
    sampled = evidence.setting["temperature"] > 0
    z = {name: metrics.martingale_z(rows) for name, rows in evidence.untimed.items()} if sampled else {}
    return {"rule": RULE + (LOSSY_RULE if evidence.lossy else ""), "pairs": pairs, "divergences": listed, "z": z}


def find_problems(by_drafter: Mapping[str, Mapping[str, Any]], losslessness: Mapping[str, Any], batch_size: int, *, lossy: bool = False) -> list[str]:
    """What must not be: an unexplained divergence, a z-score beyond ±4 (unless the rule is lossy), or (batch 1, at least 6 prompts) a speed-up
    whose lower end exceeds τ · 1.02."""
    problems = []
    for pair, counts in losslessness["pairs"].items():
        if counts[UNEXPLAINED]:
            problems.append(f"{pair}: {counts[UNEXPLAINED]} output(s) differ without a tie to explain it")
    for name, z in losslessness["z"].items():
        if not lossy and z is not None and not math.isnan(z) and abs(z) > MAX_Z:
            problems.append(f"{name}: z = {z:.1f}; its samples are not the target's")
    for name, figures in by_drafter.items():
        interval, tau = figures["speedup_ci95"], figures["tau"]
        judged = batch_size == 1 and interval is not None and tau is not None and figures["prompts"] >= FEWEST_PROMPTS
        if judged and interval[0] > tau * SPEED_LIMIT:
            problems.append(f"{name}: speed-up of at least {interval[0]:.2f} with τ = {tau:.2f} is impossible; the timing is not fair")
    return problems


def _at_tau_gamma(evidence: Evidence) -> dict[str, Any]:
    found = {}
    for name in evidence.drafters:
        if name in evidence.drafting.get("grown_by", ()):
            continue
        rows = evidence.untimed.get(name)
        if rows is None and name != "none" and set(evidence.gamma.get(name, {}).values()) == {evidence.tau_gamma}:
            rows = [c for b in evidence.blocks for c in b.runs[name].completions]
        if rows:
            found[name] = acceptance(rows)
    return {"gamma": evidence.tau_gamma, "by_drafter": found}


def _expected(evidence: Evidence) -> dict[str, Any] | None:
    """Expected τ of the head (from the checkpoint's own metrics, for drafts as long as its unrolling) beside what was decoded, cut to the
    same length; None for that where the decoded drafts were shorter."""
    if evidence.expected is None:
        return None
    gamma = evidence.expected["gamma"]
    rows = evidence.untimed.get("head") if evidence.tau_gamma >= gamma else None
    if rows is None and evidence.gamma.get("head", {}).get("head", 0) >= gamma:
        rows = [c for b in evidence.blocks for c in b.runs["head"].completions]
    rounds = trimmed(metrics.all_rounds(rows or []))
    measured = sum(1 + min(r.accepted, gamma) for r in rounds) / len(rounds) if rounds else None
    return {**evidence.expected, "measured_tau": measured}


def _cost_model(evidence: Evidence, by_drafter: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    if evidence.costs is None:
        return None
    predicted = {}
    for name in evidence.drafters:
        if name != "none":
            rounds = [r for b in evidence.blocks for c in b.runs[name].completions for r in c.rounds]
            predicted[name] = {
                "before": evidence.predicted.get(name), "from_rounds": predict(trimmed(rounds), evidence.costs)[0] if rounds else None,
                "measured": by_drafter[name]["speedup"],
            }
    return {
        **evidence.costs.to_json(), "gamma": evidence.gamma, "gamma_chosen": evidence.gamma_chosen, "predicted": predicted,
        "table": evidence.gamma_table,
    }


def trimmed(rounds: Iterable[RoundStat]) -> list[RoundStat]:
    """Rounds whose `accepted` counts only what was emitted: tokens after the end of an answer earn no speed-up."""
    return [RoundStat(r.drafted, r.nodes, min(r.accepted, max(r.emitted - 1, 0)), r.emitted, r.source) for r in rounds]


def schema() -> dict[str, Any]:
    text = (importlib.resources.files("draftheads.eval.report") / "schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def definitions() -> dict[str, str]:
    """What every figure means: the schema's own descriptions, so that file and report cannot disagree."""
    defs = schema()["$defs"]
    found = {**defs["acceptance"]["properties"], **defs["metrics"]["properties"]}
    return {name: field["description"] for name, field in found.items()}


def plain(value: Any) -> Any:
    """JSON has no NaN: None instead, at any depth; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
