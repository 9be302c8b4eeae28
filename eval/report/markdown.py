"""report.md: the same figures as a text that a forge renders and a terminal shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftheads.eval.report.tables import COLUMNS, category_columns, category_rows, expectation, figure, labels, main_rows, setting, tuned


def render_markdown(report: Mapping[str, Any]) -> str:
    """The text of a report dict that follows schema.json. Model output appears in the page only."""
    p, names = report["provenance"], labels(report)
    parts = [
        f"# Evaluation of {_cell(p['checkpoint'].get('name', 'a draft head'))} on {_cell(p['target'].get('name', '?'))}",
        report["verdict"],
        *([tuned(report["tuned"])] if report["tuned"] else []),
        _cell(setting(report)) + ".",
        _table(COLUMNS, main_rows(report)),
        "## By category", _table(category_columns(report), category_rows(report)),
        "## Advice", "\n".join(f"- **{_cell(c)}**: {a['use']}. {a['why']}." for c, a in report["advice"].items()),
    ]
    at = report["at_tau_gamma"]
    if at["by_drafter"]:
        rows = [[names[n], figure(f["tau"]), figure(f["tau_macro"]), figure(f["tau_untrimmed"]), figure(f["tau_without_loops"]),
                 figure(f["acceptance_rate"])] for n, f in at["by_drafter"].items()]
        parts += [f"## Acceptance at γ = {at['gamma']}", _table(["drafter", "τ", "macro", "untrimmed", "without loops", "acceptance rate"], rows)]
    if report["expected"]:
        parts.append(expectation(report["expected"]))
    parts += _costs(report)
    parts += ["## Lossless", report["losslessness"]["rule"]]
    pairs = report["losslessness"]["pairs"]
    if pairs:
        parts.append(_table(["pair", "identical", "tie", "unexplained"],
                            [[n, str(c["identical"]), str(c["tie"]), str(c["unexplained"])] for n, c in pairs.items()]))
    for name, z in report["losslessness"]["z"].items():
        parts.append(f"z-score of {name}: {figure(z)}.")
    for d in report["losslessness"]["divergences"]:
        size = f"gap {figure(d['gap'], 6)} (bound {figure(d['bound'], 6)})"
        parts.append(f"- {_cell(d['id'])}, {d['pair']}: {d['verdict']} at token {d['position']}, {size}")
    parts += ["## Definitions", "\n".join(f"- **{k}**: {v}" for k, v in report["definitions"].items())]
    parts += ["## Provenance", "\n".join(f"- {k}: {_flat(v)}" for k, v in p.items())]
    return "\n\n".join(parts) + "\n"


def _costs(report: Mapping[str, Any]) -> list[str]:
    cost = report["cost_model"]
    if not cost:
        return []
    rows = [[labels(report)[n], ", ".join(f"{k} {g}" for k, g in cost["gamma"].get(n, {}).items()) or "tree", figure(p["before"], 2, "×"),
             figure(p["from_rounds"], 2, "×"), figure(p["measured"], 2, "×")] for n, p in cost["predicted"].items()]
    verify = ", ".join(f"v({w}) = {cost['v'][w - 1]:.2f}" for w in cost["widths"])
    parts = ", ".join(f"c({n}) = {c:.3f}, o({n}) = {cost['o'].get(n, 0):.3f}" for n, c in cost["c"].items())
    return ["## Cost model", f"One autoregressive step takes {cost['t_ar_s'] * 1000:.1f} ms. In units of it: {verify}; {parts}.",
            _table(["drafter", "γ", "predicted before", "predicted from its rounds", "measured"], rows)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows])


def _cell(text: str) -> str:
    """Names come from prompt files: they must not open a table cell, a tag or a link."""
    for char in "\\|<>[]`*_":
        text = text.replace(char, "\\" + char) if char not in "<>" else text.replace(char, {"<": "&lt;", ">": "&gt;"}[char])
    return " ".join(text.split())


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_flat(v)}" for k, v in value.items())
    return _cell(str(value))
