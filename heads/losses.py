"""Losses of draft heads: pure functions of gathered slots, each float32 [M] with gradients to the draft's side only. `train.loss` in a recipe is a
weighted sum of them, by name.

p is the target's distribution over its *full* vocabulary: p(v) = exp(teacher_logits − teacher_lse), not renormalised on the draft vocabulary. A slot
whose mass lies outside the draft vocabulary weighs less, instead of being sharpened to a distribution the target never had, and the acceptance
α = Σ_v min(p(v), q(v)) is the true one. q is the softmax over the draft vocabulary.

Shape suffixes: M slots, U draft vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

TOP_K = 10  # HASS's


@dataclass
class Teacher:
    """The target at M positions, shared by all steps that are trained against them. lse_M: log-sum-exp of its full-vocabulary logits. label_M:
    draft id of the token that followed, −1 where the draft vocabulary has none. final_MD: its post-norm states, None unless a loss needs them."""

    logits_MU: Tensor
    lse_M: Tensor
    label_M: Tensor
    final_MD: Tensor | None = None

    def at(self, rows_N: Tensor) -> Teacher:
        """The teacher of some of the positions."""
        return Teacher(self.logits_MU[rows_N], self.lse_M[rows_N], self.label_M[rows_N], None if self.final_MD is None else self.final_MD[rows_N])

    @cached_property
    def logp_MU(self) -> Tensor:
        return (self.logits_MU.float() - self.lse_M.float()[:, None]).detach()

    @cached_property
    def p_MU(self) -> Tensor:
        return self.logp_MU.exp()

    @cached_property
    def top_MK(self) -> tuple[Tensor, Tensor]:
        """p and draft ids of the likeliest tokens, found once for all steps."""
        return self.p_MU.topk(min(TOP_K, self.p_MU.shape[-1]), -1)


@dataclass
class Slots:
    """What a loss may look at: the draft logits of M slots and the teacher of each. state_MD: the head's prediction of the target's post-norm state.
    confidence_M: logits of the probability of acceptance. Both are None unless a loss needs them (`STATES`, `CONFIDENCE`)."""

    draft_logits_MU: Tensor
    teacher: Teacher
    state_MD: Tensor | None = None
    confidence_M: Tensor | None = None

    @cached_property
    def logq_MU(self) -> Tensor:
        return self.draft_logits_MU.float().log_softmax(-1)

    @cached_property
    def alpha_M(self) -> Tensor:
        """α, with gradient to the draft."""
        return torch.minimum(self.teacher.p_MU, self.logq_MU.exp()).sum(-1)


def soft_ce(s: Slots) -> Tensor:
    """−Σ_{v ∈ draft vocabulary} p(v) log q(v): distillation, what EAGLE-3 and most others minimise."""
    logits_MU = s.draft_logits_MU.float()  # not through log q: one tensor of this size less
    p_MU = s.teacher.p_MU
    return p_MU.sum(-1) * torch.logsumexp(logits_MU, -1) - (p_MU * logits_MU).sum(-1)


def ce(s: Slots) -> Tensor:
    """−log q(true token); 0 where the draft vocabulary does not have it. What Medusa-1 minimises."""
    logits_MU = s.draft_logits_MU.float()
    picked_M = logits_MU.gather(-1, s.teacher.label_M.clamp(min=0)[:, None])[:, 0]
    return torch.where(s.teacher.label_M >= 0, torch.logsumexp(logits_MU, -1) - picked_M, 0.0)


def kl(s: Slots) -> Tensor:
    """KL(p‖q) over the draft vocabulary: soft_ce less p's entropy, which has no gradient. With the whole vocabulary a perfect draft has 0."""
    return soft_ce(s) + torch.xlogy(s.teacher.p_MU, s.teacher.p_MU).sum(-1)


def reverse_kl(s: Slots) -> Tensor:
    """KL(q‖p) over the draft vocabulary: seeks modes, and never divides by a p that is 0 in float32 (log p comes from logits)."""
    return (s.logq_MU.exp() * (s.logq_MU - s.teacher.logp_MU)).sum(-1)


def tv(s: Slots) -> Tensor:
    """1 − α: the probability that a draft drawn from q is rejected (total variation; arXiv 2211.17192)."""
    return 1 - s.alpha_M


def lk(s: Slots) -> Tensor:
    """−log α: the likelihood of acceptance (LK loss, arXiv 2602.23881)."""
    return -s.alpha_M.clamp(min=1e-6).log()


def lk_hybrid(s: Slots, eta: float = 3.0) -> Tensor:
    """λ·KL(p‖q) + (1 − λ)·TV with λ = exp(−η·α), α detached: KL's strong gradients while drafts are poor, the acceptance itself once they are good
    (arXiv 2602.23881). λ is each slot's own, as in speculators: one λ for a batch's mean α, the paper's, would change with the micro-batches."""
    weight_M = torch.exp(-eta * s.alpha_M.detach())
    return weight_M * kl(s) + (1 - weight_M) * tv(s)


def topk(s: Slots) -> Tensor:
    """soft_ce on the target's TOP_K likeliest tokens of the draft vocabulary alone (HASS, arXiv 2408.15766)."""
    p_MK, ids_MK = s.teacher.top_MK
    logits_MU = s.draft_logits_MU.float()
    return p_MK.sum(-1) * torch.logsumexp(logits_MU, -1) - (p_MK * logits_MU.gather(-1, ids_MK)).sum(-1)


def smooth_l1(s: Slots) -> Tensor:
    """Mean over D of SmoothL1(predicted state, the target's state): EAGLE-1's feature regression (arXiv 2401.15077)."""
    assert s.state_MD is not None and s.teacher.final_MD is not None
    return F.smooth_l1_loss(s.state_MD.float(), s.teacher.final_MD.detach().float(), reduction="none").mean(-1)


def confidence(s: Slots) -> Tensor:
    """Binary cross-entropy of the confidence against α, which is not pulled towards it: DSpark's 1 − ½‖p − q‖₁ (where p's whole mass is in the draft
    vocabulary the two are the same)."""
    assert s.confidence_M is not None
    return F.binary_cross_entropy_with_logits(s.confidence_M.float(), s.alpha_M.detach().clamp(0, 1), reduction="none")


LOSSES: Mapping[str, Callable[[Slots], Tensor]] = {
    f.__name__: f for f in (soft_ce, ce, kl, reverse_kl, tv, lk, lk_hybrid, topk, smooth_l1, confidence)
}
STATES, CONFIDENCE = {"smooth_l1"}, {"confidence"}


def combined(s: Slots, weights: Mapping[str, float]) -> Tensor:
    """Σ weight · loss, float32 [M]."""
    total_M = torch.zeros_like(s.teacher.lse_M, dtype=torch.float32)
    for name, weight in weights.items():
        total_M = total_M + weight * LOSSES[name](s)
    return total_M
