"""report.html: one file with everything in it (style, drawings), nothing fetched, no script. jinja2 escapes whatever the model wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from draftheads.eval.report import svg
from draftheads.eval.report.tables import count, figure, labels, order, percent, setting, tuned
from draftheads.eval.report.tables import gamma as lengths
from draftheads.eval.verdict import stamp


def render_html(report: Mapping[str, Any]) -> str:
    """The page of a report dict that follows schema.json."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("draftheads.eval", "report"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "percent": percent, "count": count}
    environment.globals |= {"labels": labels(report), "lengths": lengths, "stamp": stamp(report), "setting": setting(report),
                            "tuned": tuned(report["tuned"]) if report["tuned"] else None}
    return environment.get_template("report.html.j2").render(r=report, drafters=order(report["by_drafter"]), charts=charts(report))


def charts(report: Mapping[str, Any]) -> dict[str, Markup]:
    """The page's drawings by name; a drawing without data is left out."""
    by_drafter = report["by_drafter"]
    drafting = [d for d in order(by_drafter) if d != "none"]
    categories = list(report["by_category"])
    groups = [("all", by_drafter)] + [(c, {d: by_drafter[d]["by_category"][c] for d in by_drafter}) for c in categories]
    drawn: dict[str, Markup] = {}
    if any(by_drafter[d]["speedup"] is not None for d in drafting):
        rows = [(name, [_interval(d, sets[d]) for d in drafting]) for name, sets in groups]
        drawn["speedup"] = svg.intervals("Speed-up over decoding without drafts, with 95 % intervals, by category and drafter", rows)
    if drafting:
        tau_rows = [(name, [svg.Point(d, sets[d]["tau"]) for d in drafting]) for name, sets in groups]
        drawn["tau"] = svg.bars("Tokens per verify round (τ) by category and drafter", tau_rows, reference=1.0)
        positions = {d: by_drafter[d]["acceptance_per_position"] for d in drafting}
        if any(positions.values()):
            drawn["positions"] = svg.lines("Share of rounds with at least i drafted tokens accepted", positions, x_name="position i in the draft")
    cost = report["cost_model"]
    if cost:
        rows = [(labels(report)[d], [svg.Point("before", p["before"]), svg.Point("rounds", p["from_rounds"]), svg.Point("measured", p["measured"])])
                for d, p in cost["predicted"].items()]
        drawn["predicted"] = svg.bars("Predicted and measured speed-up", rows, reference=1.0, unit="×")
        drawn["verify"] = svg.bars("Cost of verifying w tokens, in autoregressive steps",
                                   [(f"w = {w}", [svg.Point("measured", cost["v"][w - 1])]) for w in cost["widths"]], reference=1.0)
    return drawn


def _interval(drafter: str, figures: Mapping[str, Any]) -> svg.Point:
    low, high = figures["speedup_ci95"] or (None, None)
    return svg.Point(drafter, figures["speedup"], low, high)
