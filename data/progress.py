"""How far a long job is: a bar with tokens/s and ETA on a terminal, a plain line every few seconds elsewhere. Writes to stderr only."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

EVERY_S = 5.0


class Meter:
    """The line itself: `what done/total state`. A bar on a terminal, a plain line every few seconds elsewhere, nothing when not enabled."""

    def __init__(self, what: str, total: int, done: int = 0, *, enabled: bool = True) -> None:
        self.what, self.total, self.done = what, total, done
        self.began = self.printed = time.monotonic()
        console = Console(stderr=True)
        self.bar: Bar | None = None
        self.plain = enabled and not console.is_terminal
        if enabled and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
            self.bar = Bar(*columns, console=console)
            self.task = self.bar.add_task(what, total=total, completed=done, state="")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def draw(self, state: str, *, now: bool = False) -> None:
        """now: print the plain line whenever the last one was."""
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, state=state)
        elif self.plain and (now or time.monotonic() - self.printed > EVERY_S):
            self.printed = time.monotonic()
            print(f"{self.what} {self.done}/{self.total}  {state}", file=sys.stderr, flush=True)


class Progress(Meter):
    """`advance` after every round. The ETA counts answers still to come at the mean length so far (before any: at `guess` tokens each)."""

    def __init__(self, what: str, total: int, guess: float, *, enabled: bool = True) -> None:
        super().__init__(what, total, enabled=enabled)
        self.guess = guess
        self.tokens = self.finished_tokens = 0
        self.note = ""

    def advance(self, tokens: int, done: int = 0, done_tokens: int = 0) -> None:
        """tokens were produced; `done` answers ended, of done_tokens tokens together."""
        self.tokens += tokens
        self.done += done
        self.finished_tokens += done_tokens
        self.draw(self.state())

    def speed(self) -> float:
        return self.tokens / max(time.monotonic() - self.began, 1e-9)

    def eta_s(self) -> float:
        """Answers under way have produced tokens - finished_tokens already. The first to end are the short ones, hence the guess beside them."""
        mean = (self.finished_tokens + 32 * self.guess) / (self.done + 32)
        left = max(0.0, (self.total - self.done) * mean - (self.tokens - self.finished_tokens))
        return left / max(self.speed(), 1e-9)

    def state(self) -> str:
        # A prefill or two say nothing about the speed.
        eta = clock(self.eta_s()) if self.tokens > 0.02 * self.total * self.guess else "--:--"
        return f"{self.speed():.0f} tok/s  ETA {eta}  {self.note}".rstrip()


def clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def say(text: str, *, enabled: bool = True) -> None:
    if enabled:
        print(text, file=sys.stderr, flush=True)
