"""Predicted speed-up from measured costs, and the draft length that makes the most of them.

    S = tokens of the rounds / Σ over rounds ( γ·c + v(nodes+1) + o )      all costs in units of one autoregressive step

c is one draft step of a drafter, v(w) a verify forward of w tokens, o what a round costs beside them (accepting, committing, the
drafter's catching up). The sum runs over recorded rounds rather than over averages, because an n-gram drafter proposes nothing in many
of its rounds and these cost v(1) only. To judge a shorter γ the recorded rounds are cut: a round that accepted a of d drafts would have
accepted min(a, γ) of min(d, γ).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Protocol


class RoundLike(Protocol):
    """What the model reads of a round: see inference.requests.RoundStat."""

    drafted: int
    nodes: int
    accepted: int
    source: str


@dataclass(frozen=True)
class Costs:
    """Measured by inference/measure.py on this machine at one batch size.

    t_ar_s  seconds of one autoregressive step (drafter none)
    v       v[w−1] = verify of w tokens / t_ar; measured at `widths`, interpolated between them
    c       per source ("head", "ngram", …): one draft step / t_ar; 0 for a source that grows a tree
    o       per source: the rest of the round / t_ar
    """

    t_ar_s: float
    v: tuple[float, ...]
    c: Mapping[str, float] = field(default_factory=dict)
    o: Mapping[str, float] = field(default_factory=dict)
    widths: tuple[int, ...] = ()

    def verify(self, width: int) -> float:
        """v(w); beyond the measured widths the last slope goes on."""
        if width <= len(self.v):
            return self.v[max(width, 1) - 1]
        slope = max(0.0, (self.v[-1] - self.v[0]) / max(1, len(self.v) - 1))
        return self.v[-1] + slope * (width - len(self.v))

    def round(self, source: str, drafted: int, nodes: int | None = None) -> float:
        """Cost of one round in autoregressive steps: `drafted` tokens on the longest path of a tree of `nodes` drafted ones (None: a chain)."""
        if source == "none":
            return 1.0
        return drafted * self.c.get(source, 0.0) + self.verify((drafted if nodes is None else nodes) + 1) + self.o.get(source, 0.0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "v": list(self.v), "c": dict(self.c), "o": dict(self.o), "widths": list(self.widths)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Costs:
        return cls(value["t_ar_s"], tuple(value["v"]), dict(value["c"]), dict(value["o"]), tuple(value["widths"]))


@dataclass(frozen=True)
class Choice:
    """The best γ per source, the speed-up and τ predicted for it, and the whole table [{gamma: {...}, speedup, tau}, …]."""

    gamma: dict[str, int]
    speedup: float
    tau: float
    table: list[dict[str, Any]]


def predict(rounds: Iterable[RoundLike], costs: Costs, gamma: Mapping[str, int] | None = None) -> tuple[float, float]:
    """(speed-up, τ) of these rounds, cut to `gamma` per source where given. Prefill is outside, as in the measured speed-up."""
    tokens = spent = count = 0.0
    for r in rounds:
        limit = r.drafted if gamma is None else gamma.get(r.source, r.drafted)
        drafted = min(r.drafted, limit)
        tokens += 1 + min(r.accepted, limit)
        spent += costs.round(r.source, drafted, r.nodes if drafted == r.drafted else drafted)
        count += 1
    return (tokens / spent, tokens / count) if count else (0.0, 0.0)


def choose_gamma(rounds: Sequence[RoundLike], costs: Costs, lengths: Mapping[str, Sequence[int]]) -> Choice:
    """Try every combination of the given draft lengths per source on calibration rounds, which must have been drafted with the longest of
    them; ties go to the shorter."""
    table: list[dict[str, Any]] = []
    for combination in product(*lengths.values()):
        gamma = dict(zip(lengths, combination, strict=True))
        speedup, tau = predict(rounds, costs, gamma)
        table.append({"gamma": gamma, "speedup": speedup, "tau": tau})
    best = max(table, key=lambda row: (round(row["speedup"], 4), -sum(row["gamma"].values())))
    return Choice(best["gamma"], best["speedup"], best["tau"], table)
