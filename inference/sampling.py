"""Processed distributions: what the target samples from, in transformers' order: temperature, then top-k, then top-p.

Shape suffixes: B rows, N nodes, M path positions, V vocabulary; a leading "..." is any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.inference.requests import Sampling


@dataclass(frozen=True)
class RowSampling:
    """`Sampling` with one temperature a row. greedy is the host's copy of temperature_B == 0, so that nobody has to ask the device."""

    temperature_B: Tensor
    greedy: tuple[bool, ...]
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, temperatures: Sequence[float | None], sampling: Sampling, device: torch.device | str = "cpu") -> RowSampling:
        """A row's own temperature, or the common one where it is None."""
        values = [sampling.temperature if t is None else t for t in temperatures]
        return cls(torch.tensor(values, dtype=torch.float32, device=device), tuple(t == 0 for t in values), sampling.top_k, sampling.top_p)


def log_probs(logits: Tensor, temperature: Tensor | float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """float32 log-probabilities of shape [..., V]; removed tokens are −inf.

    Ties: a token equal to the k-th largest stays (as in transformers); of equal probabilities at the top-p border one may stay.
    """
    scores = logits.float() / temperature
    V = scores.shape[-1]
    if 0 < top_k < V:
        scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
    if top_p < 1:
        scores = scores.masked_fill(~_nucleus(scores, top_p), float("-inf"))
    return scores.log_softmax(-1)


def _nucleus(scores: Tensor, top_p: float, head: int = 1024) -> Tensor:
    """bool [..., V]: the smallest set of most likely tokens with mass top_p.

    On a CPU the `head` most likely ones nearly always hold that mass, and finding them is four times cheaper than sorting the vocabulary;
    on a GPU sorting is cheaper than asking whether they do.
    """
    flat_MV = scores.reshape(-1, scores.shape[-1])
    V = flat_MV.shape[-1]
    keep_MV = torch.zeros_like(flat_MV, dtype=torch.bool)
    todo_M = torch.ones(len(flat_MV), dtype=torch.bool, device=scores.device)
    if scores.device.type == "cpu" and V > head:
        top_MK, index_MK = flat_MV.topk(head)
        p_MK = (top_MK - flat_MV.logsumexp(-1, keepdim=True)).exp()
        keep_MV.scatter_(-1, index_MK, _inside(p_MK, top_p))
        todo_M = p_MK.sum(-1) < top_p
        if not bool(todo_M.any()):
            return keep_MV.reshape(scores.shape)
    ordered, index = flat_MV[todo_M].sort(dim=-1, descending=True, stable=True)
    keep_MV[todo_M] = torch.zeros_like(index, dtype=torch.bool).scatter_(-1, index, _inside(ordered.softmax(-1), top_p))
    return keep_MV.reshape(scores.shape)


def _inside(p: Tensor, top_p: float) -> Tensor:
    """For probabilities in falling order. A token goes when the mass *before* it reaches top_p: the one that crosses the border stays."""
    return p.cumsum(-1) - p < top_p


def row_log_probs(logits_BNV: Tensor, rows: RowSampling) -> Tensor:
    """float32 [B,N,V]. Greedy rows get temperature 1 here; the verify rules take their argmax from the raw logits instead."""
    temperature_B = torch.where(rows.temperature_B == 0, torch.ones_like(rows.temperature_B), rows.temperature_B)
    return log_probs(logits_BNV, temperature_B[:, None, None], rows.top_k, rows.top_p)


def surprise(logp_BMV: Tensor, tokens_BM: Tensor) -> Tensor:
    """float32 [B,M,3]: log p(token), entropy, and variance of log p, of the processed distributions (the martingale certificate)."""
    p_BMV = logp_BMV.exp()
    finite_BMV = logp_BMV.masked_fill(p_BMV == 0, 0.0)
    mean_BM = (p_BMV * finite_BMV).sum(-1)
    variance_BM = (p_BMV * (finite_BMV - mean_BM[..., None]) ** 2).sum(-1)
    return torch.stack([logp_BMV.gather(-1, tokens_BM[..., None])[..., 0], -mean_BM, variance_BM], -1)
