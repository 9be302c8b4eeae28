"""A live view on stderr: a bar with time left on a terminal, a line now and then elsewhere (CI, `make` into a file)."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

# Seconds between lines where there is no terminal.
EVERY = 15.0


class Progress:
    """Use as a context. `stage` begins a new bar of `total` units; `advance` and `finish` move it; `note` writes a line."""

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.bar: Any = None
        self.task: Any = None
        self.label, self.total, self.done, self.unit = "", 0.0, 0.0, ""
        self.began = self.spoke = time.monotonic()

    def __enter__(self) -> Progress:
        if not self.quiet and self.console.is_terminal:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
                       TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[rate]}"))
            self.bar = Bar(*columns, console=self.console, transient=False)
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def stage(self, label: str, total: float, unit: str = "tokens") -> None:
        self.label, self.total, self.done, self.unit = label, total, 0.0, unit
        self.began = self.spoke = time.monotonic()
        if self.bar is not None:
            self.task = self.bar.add_task(label, total=total, rate="")
        elif not self.quiet:
            print(f"{label} …", file=sys.stderr, flush=True)

    def advance(self, amount: float) -> None:
        self.done += amount
        now = time.monotonic()
        rate = self.done / max(now - self.began, 1e-9)
        if self.bar is not None:
            self.bar.update(self.task, completed=min(self.done, self.total), rate=self._rate(rate))
        elif not self.quiet and now - self.spoke > EVERY:
            self.spoke = now
            left = (self.total - self.done) / rate if rate else 0
            text = f"  {self.label}: {self.done / max(self.total, 1):.0%}, about {left:.0f} s left {self._rate(rate)}"
            print(text.rstrip(), file=sys.stderr, flush=True)

    def _rate(self, rate: float) -> str:
        return f"({rate:.0f} tokens/s)" if self.unit == "tokens" else ""

    def finish(self) -> None:
        self.done = self.total
        if self.bar is not None:
            self.bar.update(self.task, completed=self.total)

    def note(self, text: str) -> None:
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)
