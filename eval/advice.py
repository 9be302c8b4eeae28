"""Per category: use the head, copying, both, another drafter, or nothing; read off the intervals of the measured speed-ups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USE = {"head": "head", "ngram": "n-gram", "suffix": "suffix", "mtp": "MTP", "draft_model": "draft model", "composite": "both"}
# Two drafters must beat one by this much before they are advised: below it the simpler set-up wins.
WORTH = 1.02


def advise(by_drafter: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """{"use": a value of USE, or "nothing", "why": one sentence} from {drafter: summary} of one category.

    A drafter is proven when the lower end of its interval is above 1. Among proven ones the fastest is advised, but `both` only when it is
    at least 2 % faster than its better part.
    """
    seen = {name: by_drafter[name] for name in USE if by_drafter.get(name, {}).get("speedup") is not None}
    if not seen:
        return {"use": "nothing", "why": "no drafter was timed against the autoregressive path"}
    proven = {n: s["speedup"] for n, s in seen.items() if s.get("speedup_ci95") and s["speedup_ci95"][0] > 1}
    fastest = max(seen, key=lambda n: seen[n]["speedup"])
    if not proven:
        speed, ci = seen[fastest]["speedup"], seen[fastest].get("speedup_ci95")
        if ci is None:
            return {"use": "nothing", "why": f"one block only: {USE[fastest]} reached {speed:.2f}×, without an interval that is no proof"}
        reached = f"the fastest, {USE[fastest]}, reached {speed:.2f}× with an interval of {ci[0]:.2f} to {ci[1]:.2f}"
        return {"use": "nothing", "why": reached + (", which includes 1" if ci[1] >= 1 else "")}
    best = max(proven, key=lambda n: proven[n])
    parts = {n: s for n, s in proven.items() if n != "composite"}
    if best == "composite" and parts:
        part = max(parts, key=lambda n: parts[n])
        if proven["composite"] < parts[part] * WORTH:
            best = part
            return {"use": USE[part], "why": f"{_with_interval(seen[part])}; both together ({proven['composite']:.2f}×) gain less than 2 % more"}
    return {"use": USE[best], "why": _with_interval(seen[best])}


def _with_interval(summary: Mapping[str, Any]) -> str:
    low, high = summary["speedup_ci95"]
    return f"{summary['speedup']:.2f}× (95 % interval {low:.2f} to {high:.2f})"
