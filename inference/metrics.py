"""Acceptance metrics of decoding, defined once. Everything is computed from RoundStat records.

A *round* is one propose + verify of one row; prefill and the token it yields belong to no round. Example: a chain of 4 with 0, 2 and 4
drafts accepted emits 1, 3 and 5 tokens: τ = 3.0, acceptance rate 6/12 = 0.5.

- `tau`              tokens per round, bonus token included (autoregressive = 1), trimmed at the end of the answer; micro mean over rounds
- `tau_macro`        mean over rows of the row's own tau
- `tau_untrimmed`    (accepted + 1) per round, as engines count it: tokens after the end included
- `acceptance_rate`  accepted / drafted tokens on the longest path; tree nodes beside the path are not in the denominator
- `acceptance_per_position`  unconditional: share of all rounds in which at least i drafts were accepted
- `conditional_acceptance`   acceptance at position i among the rounds that drafted i tokens and accepted the i−1 before
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from draftheads.inference.requests import Completion, RoundStat

NAN = float("nan")


def all_rounds(completions: Iterable[Completion]) -> list[RoundStat]:
    return [r for c in completions for r in c.rounds]


def tau(rounds: Sequence[RoundStat]) -> float:
    """Emitted tokens per round, trimmed; NaN without rounds."""
    return _ratio(sum(r.emitted for r in rounds), len(rounds))


def tau_macro(completions: Iterable[Completion]) -> float:
    """Mean over rows (that had a round) of the row's tau."""
    rows = [tau(c.rounds) for c in completions if c.rounds]
    return _ratio(sum(rows), len(rows))


def tau_untrimmed(rounds: Sequence[RoundStat]) -> float:
    return _ratio(sum(r.accepted + 1 for r in rounds), len(rounds))


def acceptance_rate(rounds: Sequence[RoundStat]) -> float:
    """Accepted / drafted on the path; NaN when nothing was drafted."""
    return _ratio(sum(r.accepted for r in rounds), sum(r.drafted for r in rounds))


def acceptance_per_position(rounds: Sequence[RoundStat], depth: int | None = None) -> list[float]:
    """Element i−1: share of all rounds with ≥ i accepted drafts. 1 + their sum = tau_untrimmed, when depth (default: longest draft) covers all."""
    depth = max((r.drafted for r in rounds), default=0) if depth is None else depth
    return [_ratio(sum(r.accepted >= i for r in rounds), len(rounds)) for i in range(1, depth + 1)]


def conditional_acceptance(rounds: Sequence[RoundStat], depth: int | None = None) -> list[float]:
    """Element i−1: P(i-th draft accepted | i drafted, the i−1 before accepted); NaN where that never happened."""
    depth = max((r.drafted for r in rounds), default=0) if depth is None else depth
    reached = [[r for r in rounds if r.drafted >= i and r.accepted >= i - 1] for i in range(1, depth + 1)]
    return [_ratio(sum(r.accepted >= i for r in some), len(some)) for i, some in enumerate(reached, 1)]


def loop_start(tokens: Sequence[int], max_period: int = 32, min_repeats: int = 3, min_length: int = 16) -> int | None:
    """Index where the loop that `tokens` ends in begins (its first repetition is kept), or None.

    A loop: the end of the row is periodic with a period ≤ max_period over at least min_repeats periods and min_length tokens. The
    answer tokens[:loop_start] contains one period; what follows only repeats it.
    """
    n = len(tokens)
    best: int | None = None
    for period in range(1, min(max_period, n // 2) + 1):
        same = 0
        while same < n - period and tokens[n - 1 - same] == tokens[n - 1 - same - period]:
            same += 1
        if same + period >= max(min_repeats * period, min_length) and (best is None or n - same < best):
            best = n - same
    return best


def without_loop(completion: Completion) -> list[RoundStat]:
    """The rounds of a completion up to where its loop begins; the round that crosses the point is trimmed. All rounds if it does not loop."""
    cut = loop_start(completion.tokens)
    if cut is None:
        return completion.rounds
    kept: list[RoundStat] = []
    room = cut - 1  # the first token belongs to prefill
    for r in completion.rounds:
        if room <= 0:
            break
        kept.append(RoundStat(r.drafted, r.nodes, r.accepted, min(r.emitted, room), r.source))
        room -= r.emitted
    return kept


def martingale_z(completions: Iterable[Completion]) -> float:
    """z-score of Σ(log p(x_t) + H_t) / √ΣVar over rows decoded with certificate=True: standard normal if the tokens really are draws from
    the processed target distribution. It misses biases that keep the mean of log p; NaN when there is no variance (greedy)."""
    total = variance = 0.0
    for c in completions:
        if c.logprob_sum is None or c.entropy_sum is None or c.variance_sum is None:
            continue
        total += c.logprob_sum + c.entropy_sum
        variance += c.variance_sum
    return total / math.sqrt(variance) if variance > 0 else NAN


def _ratio(above: float, below: float) -> float:
    return above / below if below else NAN
