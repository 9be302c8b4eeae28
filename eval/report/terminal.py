"""What specdec-eval prints at its end: the table, the verdict, the advice, where the page is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftheads.eval.report.tables import COLUMNS, category_columns, category_rows, expectation, main_rows, setting, tuned


def print_report(report: Mapping[str, Any], folder: Path) -> None:
    """To stdout. Categories and prompt ids are printed as they are, never as markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:  # a log file or a pipe has no width of its own; rich would take 80 columns and break the table's words
        console = Console(highlight=False, width=120)
    tables = [(COLUMNS, main_rows(report))]
    if len(report["by_category"]) > 1:
        tables.append((category_columns(report), category_rows(report)))
    for columns, rows in tables:
        table = Table(show_edge=False, pad_edge=False, header_style="dim")
        for i, column in enumerate(columns):
            table.add_column(Text(column), justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*[Text(cell, style="bold red" if cell == "NO" else "") for cell in row])
        console.print(table)
        console.print()
    if report["drafting"]["tree"] or report["drafting"]["draft_model"]:
        console.print(Text(setting(report), style="dim"), soft_wrap=True)
    console.print(Text(report["verdict"], style="bold" if report["ok"] else "bold red"), soft_wrap=True)
    if report["tuned"]:
        console.print(Text(tuned(report["tuned"]), style="bold"), soft_wrap=True)
    if report["expected"]:
        console.print(Text(expectation(report["expected"])), soft_wrap=True)
    at = report["at_tau_gamma"]
    if "head" in at["by_drafter"]:
        taus = ", ".join(f"{n} {f['tau']:.2f}" for n, f in at["by_drafter"].items() if f["tau"] is not None)
        console.print(Text(f"τ with head drafts of {at['gamma']} tokens: {taus}."), soft_wrap=True)
    console.print(Text(f"Report: {folder / 'report.html'}"), soft_wrap=True)
