"""The main table (one row per drafter) and how numbers are written; shared by the terminal, the Markdown and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LABELS = {
    "none": "none", "ngram": "n-gram", "suffix": "suffix", "draft_model": "draft model", "mtp": "MTP", "head": "head", "composite": "n-gram + head",
}
# Sampling options that the line under the title names, and their defaults.
HISTORY = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
COLUMNS = ["drafter", "γ", "τ", "accepted at position 1, 2, …", "tokens/s", "vs none", "95 %", "vs transformers", "lossless"]


def labels(report: Mapping[str, Any]) -> dict[str, str]:
    """Drafters as tables call them."""
    return LABELS | {"composite": f"{LABELS[report['drafting']['copy_first']]} + head"}


def order(names: Iterable[str]) -> list[str]:
    known = list(LABELS)
    return sorted(names, key=lambda n: known.index(n) if n in known else len(known))


def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def yes(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "–"}[value]


def positions(values: Sequence[float | None], most: int = 8) -> str:
    return " ".join("–" if v is None else f"{v:.0%}" for v in values[:most]) or "–"


def gamma(figures: Mapping[str, Any]) -> str:
    return ", ".join([*map(str, figures.get("gamma", {}).values()), *(["tree"] if figures.get("tree") else [])]) or "–"


def interval(pair: Sequence[float] | None) -> str:
    return "–" if pair is None else f"{pair[0]:.2f}–{pair[1]:.2f}"


def main_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Cells in the order of COLUMNS; transformers' own line last, where it ran."""
    rows = []
    for name in order(report["by_drafter"]):
        f = report["by_drafter"][name]
        rows.append([
            labels(report)[name], gamma(f), figure(f["tau"]), positions(f["acceptance_per_position"]), figure(f["tokens_per_s"], 1),
            figure(f["speedup"], 2, "×"), interval(f["speedup_ci95"]) if name != "none" else "–",
            figure(f["speedup_vs_transformers"], 2, "×"), yes(f["lossless"]),
        ])
    theirs = report["summary"]["transformers_tokens_per_s"]
    if theirs is not None:
        rows.append(["transformers", "–", "1.00", "–", figure(theirs, 1), "–", "–", "1.00×", "–"])
    return rows


def category_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Per category: the speed-up of every drafter, τ of the one under test, and the advice."""
    drafters = [d for d in order(report["by_drafter"]) if d != "none"]
    rows = []
    for category in report["by_category"]:
        cells = [category]
        for d in drafters:
            f = report["by_drafter"][d]["by_category"][category]
            cells.append(f"{figure(f['tau'])} · {figure(f['speedup'], 2, '×')}")
        rows.append([*cells, report["advice"][category]["use"]])
    return rows


def category_columns(report: Mapping[str, Any]) -> list[str]:
    return ["category", *[f"{labels(report)[d]}: τ · speed-up" for d in order(report["by_drafter"]) if d != "none"], "use"]


def setting(report: Mapping[str, Any]) -> str:
    """What was measured and how, in one line."""
    s, drafting = report["summary"], report["drafting"]
    processed = {k: v for k, v in report["settings"].get("eval", {}).items() if k in HISTORY and v != HISTORY[k]}
    parts = [f"{s['prompts']} prompts", f"temperature {s['temperature']:g}", *(f"{k} {v:g}" for k, v in processed.items()),
             f"batch size {s['batch_size']}", f"{s['device']}, {s['dtype']}", f"{report['provenance']['threads']} threads"]
    if drafting["tree"] and drafting["grown_by"]:
        parts.append(f"{', '.join(labels(report)[d] for d in drafting['grown_by'])}: tree {drafting['tree']}")
    if drafting["draft_model"]:
        parts.append(f"draft model {drafting['draft_model']}")
    return " · ".join(parts)


def expectation(expected: Mapping[str, Any]) -> str:
    """Training's own estimate beside what decoding reached, in one sentence."""
    there = expected.get("training_prompts_tau")
    seen = f"{figure(there)} on training prompts, " if there is not None else ""
    return (f"Head at γ = {expected['gamma']}: τ = {figure(expected['tau'])} expected from {expected['source']}; decoded: {seen}"
            f"{figure(expected['measured_tau'])} on the held-out prompts.")


def tuned(found: Mapping[str, Any]) -> str:
    """What a report of a tuned target says of the change, in every form of it."""
    was, now = found["perplexity"]["original"], found["perplexity"]["tuned"]
    text = "" if was is None else f" Perplexity of the prompts' own text: {was:.2f} under the original, {now:.2f} under the tuned model."
    kl, agree = found["kl"], found["top1_agreement"]
    moved = "" if kl is None else (f" On {found['answer_tokens']:,} answer tokens: KL(original ‖ tuned) {kl:.4f} nats a token, the same first choice "
                                   f"at {agree:.1%}.")
    return f"The target was tuned along with this head. {found['statement']}{text}{moved}"
