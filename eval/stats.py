"""Confidence intervals for ratios of throughputs, by resampling whole blocks.

A block is what was timed as one unit: one prompt at batch size 1, one batch of prompts otherwise. Both sides of a ratio ran the same
blocks, so a resample draws the same blocks for both (paired): the spread between easy and hard prompts cancels, only the spread of
their ratio is left. Rounds inside a prompt are correlated, so nothing smaller than a block may be resampled.

Shape suffixes: N blocks, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Throughput:
    """Tokens and seconds of every block of one drafter, in the order of the blocks."""

    tokens: Sequence[float]
    seconds: Sequence[float]

    @property
    def per_s(self) -> float | None:
        return float(sum(self.tokens) / sum(self.seconds)) if sum(self.seconds) > 0 and sum(self.tokens) > 0 else None


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; low and high are None where one block leaves nothing to resample."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def pair(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def ratio_interval(top: Throughput, bottom: Throughput, *, samples: int = 2000, seed: int = 0, level: float = 0.95) -> Interval:
    """Ratio of the two throughputs, each a ratio of sums, with the percentile bootstrap over blocks (Efron & Tibshirani 1993, §13).

    Both sides must list the same blocks. A ratio of sums weighs a block by its tokens, as a user's clock does; the mean of per-prompt
    ratios would let a three-token answer count as much as a long one.
    """
    if not len(top.tokens) == len(top.seconds) == len(bottom.tokens) == len(bottom.seconds):
        raise ValueError(f"paired ratio of {len(top.tokens)} and {len(bottom.tokens)} blocks")
    if top.per_s is None or bottom.per_s is None:
        return Interval(None)
    value = top.per_s / bottom.per_s
    blocks = len(top.tokens)
    if blocks < 2:
        return Interval(value)
    rng = np.random.default_rng(seed)
    weights_RN = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=samples).astype(np.float64)
    sums = [weights_RN @ np.asarray(side, dtype=np.float64) for side in (top.tokens, top.seconds, bottom.tokens, bottom.seconds)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios_R = (sums[0] / sums[1]) / (sums[2] / sums[3])
    ratios_R = ratios_R[np.isfinite(ratios_R)]  # a resample of empty answers only (no tokens after the first) says nothing
    if not len(ratios_R):
        return Interval(value)
    low, high = np.quantile(ratios_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))
