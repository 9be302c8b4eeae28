"""The report's first sentences: the stamp of a lossy rule, what is wrong, else the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from draftheads.eval.lossless import IDENTICAL, TIE

NAMES = {
    "none": "no drafts", "ngram": "the n-gram drafter", "suffix": "the suffix drafter", "head": "the draft head", "mtp": "the target's MTP layers",
    "draft_model": "a smaller model",
}


def stamp(report: Mapping[str, Any]) -> str | None:
    """What must stand above a report whose acceptance rule is lossy."""
    lossy = report["lossy"]
    if lossy is None:
        return None
    rule = f"LOSSY: {lossy['rule']} acceptance (ε = {lossy['epsilon']:g}, α = {lossy['alpha']:g})"
    if report["summary"]["temperature"] == 0:
        return f"{rule}; at temperature 0 the rule is exact, and the output was checked."
    return f"{rule}; the sampled text is not a draw from the target, and figures do not compare with lossless ones."


def verdict(report: Mapping[str, Any]) -> str:
    """The result in one or two sentences; what is wrong comes first."""
    stamped = stamp(report)
    return ("" if stamped is None else stamped + " ") + _result(report)


def _result(report: Mapping[str, Any]) -> str:
    s, name = report["summary"], report["drafter"]
    if not report["ok"]:
        return "This evaluation failed: " + "; ".join(report["problems"]) + "."
    if s["speedup"] is None:
        return f"Drafter {name}: τ = {number(s['tau'])} tokens per round; no speed-up was measured." + _lossless_sentence(report)
    low_high = f" (95 % interval {s['speedup_ci95'][0]:.2f} to {s['speedup_ci95'][1]:.2f})" if s["speedup_ci95"] else ""
    if s["speedup_ci95"] and s["speedup_ci95"][0] > 1:
        head = f"Decoding is {s['speedup']:.2f}× as fast"
    elif s["speedup"] >= 1:
        head = f"No proven gain: decoding is {s['speedup']:.2f}× as fast"
    else:
        head = f"Drafting does not pay here: decoding is {s['speedup']:.2f}× as fast"
    copies = "n-gram" if report["drafting"]["copy_first"] == "ngram" else "suffix"
    kind = f" with drafter {name} ({(NAMES | {'composite': f'{copies} first, else the head'})[name]})"
    against = f", {s['speedup_vs_transformers']:.2f}× transformers' generate" if s["speedup_vs_transformers"] else ""
    return f"{head}{kind} as without drafts{low_high}{against}; τ = {number(s['tau'])} tokens per round." + _lossless_sentence(report)


def _lossless_sentence(report: Mapping[str, Any]) -> str:
    s = report["summary"]
    if s["lossless"] is None:
        return ""
    if s["temperature"] > 0:
        return f" Sampling is lossless by its martingale (z = {report['losslessness']['z'].get(report['drafter'], float('nan')):.2f})."
    counts = report["losslessness"]["pairs"].get(f"none/{report['drafter']}")
    if counts is None:
        return ""
    ties = f", {counts[TIE]} differ at a numerical tie" if counts[TIE] else ""
    whose = "tuned target" if report["tuned"] else "target"
    return f" The output is the {whose}'s own: {counts[IDENTICAL]} of {sum(counts.values())} answers are identical token for token{ties}."


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else f"{value:.{digits}f}"
