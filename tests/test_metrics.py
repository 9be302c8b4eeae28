"""Metrics by hand-computed traces."""

from __future__ import annotations

import math

import pytest
import torch

from draftheads.inference import metrics
from draftheads.inference.noise import TARGET, Noise
from draftheads.inference.requests import Completion, Request, RoundStat
from draftheads.inference.sampling import log_probs, surprise

TRACE = [RoundStat(4, 4, 0, 1, "head"), RoundStat(4, 4, 2, 3, "head"), RoundStat(4, 4, 4, 5, "ngram")]


def row(rounds: list[RoundStat], tokens: list[int] | None = None, **sums: float) -> Completion:
    tokens = list(range(1 + sum(r.emitted for r in rounds))) if tokens is None else tokens
    return Completion(Request("r", (1,)), tokens, "length", rounds, **sums)


def test_the_0_2_4_trace() -> None:
    assert metrics.tau(TRACE) == metrics.tau_untrimmed(TRACE) == 3.0
    assert metrics.acceptance_rate(TRACE) == 6 / 12
    assert metrics.acceptance_per_position(TRACE) == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert metrics.conditional_acceptance(TRACE) == [2 / 3, 1.0, 1 / 2, 1.0]
    assert 1 + sum(metrics.acceptance_per_position(TRACE)) == pytest.approx(metrics.tau_untrimmed(TRACE))


def test_tokens_after_the_end_count_in_the_untrimmed_value_only() -> None:
    rounds = [*TRACE, RoundStat(4, 4, 4, 2)]  # the answer ended at the second token of a block of five
    assert metrics.tau(rounds) == 11 / 4 and metrics.tau_untrimmed(rounds) == 14 / 4


def test_macro_weighs_rows_not_rounds() -> None:
    long, short = row([RoundStat(4, 4, 0, 1)] * 9), row([RoundStat(4, 4, 4, 5)])
    rounds = metrics.all_rounds([long, short])
    assert metrics.tau(rounds) == 14 / 10 and metrics.tau_macro([long, short, row([])]) == 3.0


def test_rounds_that_drafted_less_leave_the_conditional_denominator_only() -> None:
    rounds = [RoundStat(1, 1, 1, 2), RoundStat(3, 3, 1, 2), RoundStat(0, 0, 0, 1)]
    assert metrics.acceptance_per_position(rounds) == [2 / 3, 0, 0]
    conditional = metrics.conditional_acceptance(rounds)
    assert conditional[:2] == [1.0, 0.0] and math.isnan(conditional[2])
    assert metrics.acceptance_rate(rounds) == 2 / 4


def test_nothing_gives_nan_not_an_exception() -> None:
    assert all(math.isnan(f([])) for f in (metrics.tau, metrics.tau_macro, metrics.acceptance_rate, metrics.tau_untrimmed))
    assert metrics.acceptance_per_position([]) == []


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_a_loop_begins_after_its_first_period(period: int) -> None:
    head, body = [100, 101, 102, 103, 104], list(range(period))
    repeats = max(4, 16 // period + 2)
    assert metrics.loop_start(head + body * repeats) == len(head) + period
    assert metrics.loop_start(head + (body * repeats)[:-1]) == len(head) + period  # cut in mid-period


def test_text_that_repeats_a_little_is_no_loop() -> None:
    assert metrics.loop_start([1, 2, 3, 4] * 2) is None
    assert metrics.loop_start([1, 1, 1]) is None
    assert metrics.loop_start(list(range(50))) is None
    assert metrics.loop_start([9] * 40 + [1]) is None  # left its loop
    assert metrics.loop_start(list(range(33)) * 5) is None and metrics.loop_start(list(range(33)) * 5, max_period=33) == 33


def test_rounds_are_cut_where_the_loop_begins() -> None:
    tokens = [50, 51, 52, 53] + [1, 2] * 10
    rounds = [RoundStat(4, 4, 4, 5)] * 4 + [RoundStat(4, 4, 2, 3)]
    kept = metrics.without_loop(row(rounds, tokens))
    assert metrics.loop_start(tokens) == 6 and [r.emitted for r in kept] == [5]
    plain = row(TRACE)
    assert metrics.without_loop(plain) == TRACE


def certificate(tokens_N: torch.Tensor, logp_NV: torch.Tensor) -> Completion:
    sums = surprise(logp_NV[None], tokens_N[None])[0].double().sum(0).tolist()
    return row([], [1], logprob_sum=sums[0], entropy_sum=sums[1], variance_sum=sums[2])


def test_martingale_z_accepts_the_right_and_finds_the_wrong_temperature() -> None:
    logits_NV = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0)) * 2
    gumbel_NV = Noise(torch.tensor([5])).gumbel(torch.arange(4000)[None], TARGET, 20)[0]
    claimed_NV = log_probs(logits_NV, 0.7, top_k=10, top_p=0.9)
    right, wrong = ((log_probs(logits_NV, t, top_k=10, top_p=0.9) + gumbel_NV).argmax(-1) for t in (0.7, 0.5))
    assert abs(metrics.martingale_z([certificate(right, claimed_NV)])) < 3.5
    assert metrics.martingale_z([certificate(wrong, claimed_NV)]) > 5
    assert math.isnan(metrics.martingale_z([row(TRACE)]))


@pytest.mark.parametrize("V", [40, 3000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.3, 5, 1.0), (0.7, 0, 0.8), (1.0, 12, 0.6), (1.0, 3, 0.01), (2.0, 99, 0.999), (4.0, 0, 0.99)]
)
def test_processed_distribution_is_transformers(temperature: float, top_k: int, top_p: float, V: int) -> None:
    """V = 3000 has rows whose nucleus is wider than the shortcut's head, beside rows whose is not."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    sharpness_M1 = torch.linspace(0.5, 6, 60)[:, None]
    logits_MV = torch.randn(60, V, generator=torch.Generator().manual_seed(1)) * sharpness_M1
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(300, 1, dtype=torch.long), logits_MV.clone()).log_softmax(-1)
    torch.testing.assert_close(log_probs(logits_MV, temperature, top_k, top_p), expected)
