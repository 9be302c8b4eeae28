"""Processed distributions: what the target samples from, in transformers' order: temperature, then top-k, top-p, min-p.

What looks at the tokens written so far (repetition penalty, …) comes before all of these: processors.py.

Shape suffixes: B rows, N nodes, M path positions, V vocabulary; a leading "..." is any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.inference.requests import Sampling
from draftheads.recipes.schema import RecipeError


@dataclass(frozen=True)
class RowSampling:
    """`Sampling` with one temperature a row. greedy is the host's copy of temperature_B == 0, so that nobody has to ask the device."""

    temperature_B: Tensor
    greedy: tuple[bool, ...]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    lossy: str | None = None
    typical_epsilon: float = 0.09
    typical_alpha: float = 0.3

    @classmethod
    def of(cls, temperatures: Sequence[float | None], sampling: Sampling, device: torch.device | str = "cpu") -> RowSampling:
        """A row's own temperature, or the common one where it is None."""
        values = [sampling.temperature if t is None else t for t in temperatures]
        return cls(torch.tensor(values, dtype=torch.float32, device=device), tuple(t == 0 for t in values), sampling.top_k, sampling.top_p,
                   sampling.min_p, sampling.lossy, sampling.typical_epsilon, sampling.typical_alpha)


def check(sampling: Sampling) -> None:
    """RecipeError, one line, if a value means nothing: out of its range, not a number, a fraction where tokens are counted."""
    fine = {
        "temperature": _number(sampling.temperature) and sampling.temperature >= 0,
        "top_k": _count(sampling.top_k),
        "top_p": _number(sampling.top_p) and 0 < sampling.top_p <= 1,
        "min_p": _number(sampling.min_p) and 0 <= sampling.min_p <= 1,
        "repetition_penalty": _number(sampling.repetition_penalty) and sampling.repetition_penalty > 0,
        "no_repeat_ngram_size": _count(sampling.no_repeat_ngram_size),
        "min_new_tokens": _count(sampling.min_new_tokens),
        "lossy": sampling.lossy in (None, "typical"),
        "typical_epsilon": _number(sampling.typical_epsilon) and 0 < sampling.typical_epsilon <= 1,
        "typical_alpha": _number(sampling.typical_alpha) and sampling.typical_alpha > 0,
    }
    wrong = [f"{name}={getattr(sampling, name)!r}" for name, good in fine.items() if not good]
    if wrong:
        raise RecipeError(
            f"sampling: found {', '.join(wrong)}; wanted temperature at least 0, top_p above 0 and at most 1, min_p from 0 to 1, "
            "repetition_penalty above 0 (1 is off), whole numbers of at least 0 for top_k, no_repeat_ngram_size and min_new_tokens (0 is off), "
            "lossy None or 'typical', typical_epsilon above 0 and at most 1, typical_alpha above 0")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


def free_to_ask(tensor: Tensor) -> bool:
    """Whether the host may look at its values for a shortcut: a GPU would have to be waited for, and a captured step cannot ask at all."""
    return tensor.device.type == "cpu"


def log_probs(logits: Tensor, temperature: Tensor | float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """float32 log-probabilities of shape [..., V]; removed tokens are −inf.

    min_p removes what is less likely than min_p times the likeliest token (arXiv 2407.01082).

    Ties: a token equal to the k-th largest stays (as in transformers); of equal probabilities at the top-p border one may stay.
    """
    scores = logits.float() / temperature
    V = scores.shape[-1]
    if 0 < top_k < V:
        scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
    if top_p < 1:
        scores = scores.masked_fill(~_nucleus(scores, top_p), float("-inf"))
    if min_p > 0:
        p = scores.softmax(-1)
        scores = scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), float("-inf"))
    return scores.log_softmax(-1)


def _nucleus(scores: Tensor, top_p: float, head: int = 1024) -> Tensor:
    """bool [..., V]: the smallest set of most likely tokens with mass top_p.

    On a CPU the `head` most likely ones nearly always hold that mass, and finding them is four times cheaper than sorting the vocabulary;
    on a GPU sorting is cheaper than asking whether they do.
    """
    flat_MV = scores.reshape(-1, scores.shape[-1])
    if not free_to_ask(scores) or flat_MV.shape[-1] <= head:
        return _sorted_nucleus(flat_MV, top_p).reshape(scores.shape)
    top_MK, index_MK = flat_MV.topk(head)
    p_MK = (top_MK - flat_MV.logsumexp(-1, keepdim=True)).exp()
    keep_MV = torch.zeros_like(flat_MV, dtype=torch.bool).scatter_(-1, index_MK, _inside(p_MK, top_p))
    wider_M = p_MK.sum(-1) < top_p
    if bool(wider_M.any()):
        keep_MV[wider_M] = _sorted_nucleus(flat_MV[wider_M], top_p)
    return keep_MV.reshape(scores.shape)


def _sorted_nucleus(scores_MV: Tensor, top_p: float) -> Tensor:
    ordered, index = scores_MV.sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(index, dtype=torch.bool).scatter_(-1, index, _inside(ordered.softmax(-1), top_p))


def _inside(p: Tensor, top_p: float) -> Tensor:
    """For probabilities in falling order. A token goes when the mass *before* it reaches top_p: the one that crosses the border stays."""
    return p.cumsum(-1) - p < top_p


def row_log_probs(logits_BNV: Tensor, rows: RowSampling) -> Tensor:
    """float32 [B,N,V]. Greedy rows get temperature 1 here; the verify rules take their argmax from the raw logits instead."""
    temperature_B = torch.where(rows.temperature_B == 0, torch.ones_like(rows.temperature_B), rows.temperature_B)
    return log_probs(logits_BNV, temperature_B[:, None, None], rows.top_k, rows.top_p, rows.min_p)


def surprise(logp_BMV: Tensor, tokens_BM: Tensor) -> Tensor:
    """float32 [B,M,3]: log p(token), entropy, and variance of log p, of the processed distributions (the martingale certificate)."""
    p_BMV = logp_BMV.exp()
    finite_BMV = logp_BMV.masked_fill(p_BMV == 0, 0.0)
    mean_BM = (p_BMV * finite_BMV).sum(-1)
    variance_BM = (p_BMV * (finite_BMV - mean_BM[..., None]) ** 2).sum(-1)
    return torch.stack([logp_BMV.gather(-1, tokens_BM[..., None])[..., 0], -mean_BM, variance_BM], -1)
