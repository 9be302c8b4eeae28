"""Losses of draft heads: pure functions on gathered slots.

Shape suffixes: M slots, U draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(draft_logits_MU: Tensor, teacher_logits_MU: Tensor, teacher_lse_M: Tensor) -> Tensor:
    """−Σ_{v ∈ draft vocabulary} p(v) log q(v) per slot, float32 [M]; gradients reach the draft logits only.

    p = exp(teacher_logits − teacher_lse) with the log-sum-exp of the *full* target vocabulary, and is not renormalised: a slot whose
    mass lies outside the draft vocabulary weighs less, instead of being sharpened to a distribution the target never had.
    q is the softmax over the draft vocabulary.
    """
    with torch.no_grad():
        p_MU = torch.exp(teacher_logits_MU.float() - teacher_lse_M.float()[:, None])
        mass_M = p_MU.sum(-1)
    draft_logits_MU = draft_logits_MU.float()
    return mass_M * torch.logsumexp(draft_logits_MU, -1) - (p_MU * draft_logits_MU).sum(-1)


@torch.no_grad()
def acceptance(draft_logits_MU: Tensor, teacher_logits_MU: Tensor, teacher_lse_M: Tensor) -> Tensor:
    """α = Σ_v min(p(v), q(v)), float32 [M]: the probability that a draft sampled from q is accepted at temperature 1 (arXiv 2211.17192).

    p is the full target distribution, of which only the draft vocabulary can meet q; a p renormalised on it would be optimistic.
    """
    p_MU = torch.exp(teacher_logits_MU.float() - teacher_lse_M.float()[:, None])
    return torch.minimum(p_MU, draft_logits_MU.float().softmax(-1)).sum(-1)
