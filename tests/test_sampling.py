"""Processed distributions with min-p against transformers, and which Samplings are refused. (Without min-p: test_metrics.py.)"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling, check, log_probs, row_log_probs
from draftheads.recipes.schema import RecipeError


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 0, 1.0, 0.1), (1.3, 5, 1.0, 0.3), (1.0, 0, 0.8, 0.2), (2.0, 12, 0.9, 0.05), (1.0, 0, 1.0, 1.0), (1.0, 0, 1.0, 0.0)],
)
def test_min_p_is_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits_MV = torch.randn(60, 200, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.5, 6, 60)[:, None]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    warpers.append(MinPLogitsWarper(min_p))
    expected_MV = warpers(torch.zeros(60, 1, dtype=torch.long), logits_MV.clone()).log_softmax(-1)
    torch.testing.assert_close(log_probs(logits_MV, temperature, top_k, top_p, min_p), expected_MV)
    rows = RowSampling.of([None] * 60, Sampling(temperature, top_k, top_p, min_p))
    torch.testing.assert_close(row_log_probs(logits_MV[:, None], rows)[:, 0], expected_MV)


def test_rows_keep_every_option_they_share_with_sampling() -> None:
    sampling = Sampling(0.5, 7, 0.8, 0.1, lossy="typical", typical_epsilon=0.2, typical_alpha=0.4)
    rows = RowSampling.of([None, 0.0], sampling)
    assert rows.greedy == (False, True) and rows.temperature_B.tolist() == [0.5, 0.0]
    shared = {f.name for f in fields(RowSampling)} & {f.name for f in fields(Sampling)}
    assert shared >= {"top_k", "top_p", "min_p", "lossy", "typical_epsilon", "typical_alpha"}
    assert all(getattr(rows, name) == getattr(sampling, name) != getattr(Sampling(), name) for name in shared)


WRONG: list[dict[str, Any]] = [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": None}, {"temperature": True},
    {"top_k": -1}, {"top_k": 2.0}, {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": "0.1"},
    {"repetition_penalty": 0.0}, {"repetition_penalty": float("nan")}, {"no_repeat_ngram_size": -1}, {"no_repeat_ngram_size": 1.5},
    {"min_new_tokens": -1}, {"min_new_tokens": 3.0}, {"lossy": "nucleus"}, {"lossy": True}, {"typical_epsilon": 0.0}, {"typical_epsilon": 2.0},
    {"typical_alpha": 0.0}, {"typical_alpha": float("inf")},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_means_nothing_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong)) + "=") as refused:
        check(replace(Sampling(1.0), **wrong))
    assert "\n" not in str(refused.value) and "top_p above 0" in str(refused.value)


def test_everything_in_range_passes() -> None:
    check(Sampling())
    check(Sampling(1, 0, 1, 1, 0.5, 3, 9, "typical", 1.0, 3.0))
