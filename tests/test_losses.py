"""The losses against slow definitions in float64, at a perfect draft, and who gets gradients; and that thinned slots change no expectation."""

from __future__ import annotations

import itertools
import math
import typing
from dataclasses import replace

import pytest
import torch

from draftheads.data.features import Row
from draftheads.heads.losses import CONFIDENCE, LOSSES, STATES, TOP_K, Slots, Teacher, combined, kl, lk, lk_hybrid, reverse_kl, soft_ce, tv
from draftheads.recipes import schema
from draftheads.recipes.schema import TrainSection
from draftheads.train.align import align
from draftheads.train.figures import metric_sums
from draftheads.train.step import chunks_of

V, U, D, M = 40, 24, 16, 7
IDS_U = torch.arange(5, 5 + U)
LABELS_M = torch.tensor([0, 3, -1, 23, 2, 2, 9])


def draw(seed: int = 0, dtype=torch.float32):
    """The target's logits over its whole vocabulary, and all that is the draft's."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"target_MV": (M, V), "final_MD": (M, D), "draft_MU": (M, U), "state_MD": (M, D), "confidence_M": (M,)}
    return {name: (torch.randn(size, generator=g) * 2).to(dtype).requires_grad_() for name, size in sizes.items()}


def slots_of(x, ids_U=IDS_U) -> Slots:
    teacher = Teacher(x["target_MV"][:, ids_U], x["target_MV"].logsumexp(-1), LABELS_M, x["final_MD"])
    return Slots(x["draft_MU"], teacher, x["state_MD"], x["confidence_M"])


def slow(name: str, x) -> torch.Tensor:
    """[M], slot by slot and token by token, from softmaxes over the whole vocabularies."""
    found = []
    for m in range(M):
        p = x["target_MV"][m].detach().softmax(-1)[IDS_U]
        q = x["draft_MU"][m].softmax(-1)
        pairs = [(p[u], q[u]) for u in range(U)]
        alpha = sum(torch.minimum(a, b) for a, b in pairs)
        divergence = sum(a * (a.log() - b.log()) for a, b in pairs)
        if name == "soft_ce":
            value = -sum(a * b.log() for a, b in pairs)
        elif name == "ce":
            value = -q[LABELS_M[m]].log() if LABELS_M[m] >= 0 else q.sum() * 0
        elif name == "kl":
            value = divergence
        elif name == "reverse_kl":
            value = sum(b * (b.log() - a.log()) for a, b in pairs)
        elif name == "tv":
            value = 1 - alpha
        elif name == "lk":
            value = -alpha.log()
        elif name == "lk_hybrid":
            weight = math.exp(-3 * float(alpha))
            value = weight * divergence + (1 - weight) * (1 - alpha)
        elif name == "topk":
            best = sorted(range(U), key=lambda u: -float(p[u]))[:TOP_K]
            value = -sum(p[u] * q[u].log() for u in best)
        elif name == "smooth_l1":
            off = [x["state_MD"][m, d] - x["final_MD"][m, d].detach() for d in range(D)]
            value = sum(0.5 * o * o if abs(o) < 1 else abs(o) - 0.5 for o in off) / D
        else:
            assert name == "confidence"
            c = x["confidence_M"][m]
            value = -(float(alpha) * torch.sigmoid(c).log() + (1 - float(alpha)) * torch.sigmoid(-c).log())
        found.append(value)
    return torch.stack(found)


def gradients(loss_M: torch.Tensor, x) -> dict[str, torch.Tensor | None]:
    grads = torch.autograd.grad((loss_M * torch.linspace(0.5, 2, M).to(loss_M)).sum(), list(x.values()), allow_unused=True)
    return {name: g if g is not None and g.abs().max() > 0 else None for name, g in zip(x, grads, strict=True)}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_its_definition_and_moves_the_draft_only(name):
    x = draw()
    exact = {key: value.detach().double().requires_grad_() for key, value in x.items()}
    loss_M, expected_M = LOSSES[name](slots_of(x)), slow(name, exact)
    assert loss_M.dtype == torch.float32
    torch.testing.assert_close(loss_M.double(), expected_M, rtol=1e-5, atol=1e-5)
    found, expected = gradients(loss_M, x), gradients(expected_M, exact)
    moved = "state_MD" if name in STATES else "confidence_M" if name in CONFIDENCE else "draft_MU"
    for key in x:
        assert (found[key] is not None) == (key == moved), key
    torch.testing.assert_close(found[moved].double(), expected[moved], rtol=1e-4, atol=1e-6)


def test_bfloat16_logits_are_computed_in_float32():
    x = draw()
    rough = slots_of({**x, "draft_MU": x["draft_MU"].bfloat16(), "state_MD": x["state_MD"].bfloat16(), "confidence_M": x["confidence_M"].bfloat16()})
    near = slots_of({**x, **{key: x[key].bfloat16().float() for key in ("draft_MU", "state_MD", "confidence_M")}})
    assert all(torch.equal(f(rough), f(near)) for f in LOSSES.values())


def test_a_perfect_draft():
    """With the whole vocabulary q = p is best: divergences are 0 there, soft_ce is p's entropy, and nothing pulls."""
    x = draw()
    x["draft_MU"] = (x["target_MV"].detach() + 3.0).requires_grad_()
    x["state_MD"] = x["final_MD"].detach().clone().requires_grad_()
    slots = slots_of(x, torch.arange(V))
    for name in ("kl", "reverse_kl", "tv", "lk", "lk_hybrid", "smooth_l1"):
        assert LOSSES[name](slots).abs().max() < 5e-6, name
    p_MV = x["target_MV"].detach().softmax(-1)
    torch.testing.assert_close(soft_ce(slots), -(p_MV * p_MV.log()).sum(-1))
    for name in ("soft_ce", "kl", "reverse_kl"):
        grads = gradients(LOSSES[name](slots_of(x, torch.arange(V))), x)
        assert grads["draft_MU"] is None or grads["draft_MU"].abs().max() < 1e-6, name


def test_a_perfect_draft_of_a_reduced_vocabulary():
    """q = p / (p's mass) is best: no pull from soft_ce, kl and reverse_kl, and α is the mass itself, not 1."""
    x = draw()
    x["draft_MU"] = x["target_MV"].detach()[:, IDS_U].clone().requires_grad_()
    mass_M = x["target_MV"].detach().softmax(-1)[:, IDS_U].sum(-1)
    slots = slots_of(x)
    torch.testing.assert_close(slots.alpha_M, mass_M)
    torch.testing.assert_close(lk(slots), -mass_M.log())
    torch.testing.assert_close(reverse_kl(slots), -mass_M.log())
    for name in ("soft_ce", "kl", "reverse_kl"):
        grads = gradients(LOSSES[name](slots_of(x)), x)
        assert grads["draft_MU"] is None or grads["draft_MU"].abs().max() < 1e-6, name


def test_tv_is_the_probability_of_rejection():
    x = draw()
    slots = slots_of(x)
    assert torch.equal(tv(slots), 1 - slots.alpha_M)
    # The rule itself: a draft v ~ q is accepted with probability min(1, p(v) / q(v)), p the target's over its whole vocabulary.
    p_MU, q_MU = x["target_MV"].detach().double().softmax(-1)[:, IDS_U], x["draft_MU"].detach().double().softmax(-1)
    accepted_M = (q_MU * (p_MU / q_MU).clamp(max=1)).sum(-1)
    torch.testing.assert_close(tv(slots).double(), 1 - accepted_M, rtol=1e-5, atol=1e-6)


def test_lk_and_its_hybrid_are_the_papers():
    """arXiv 2602.23881: ∇ −log α = ∇TV / α; the hybrid's λ = exp(−3α) is a constant to the gradient; for a target that is sure of its token −log α
    is cross-entropy. KL here weighs a slot by p's mass in the draft vocabulary, and is otherwise that of the renormalised p."""
    x = draw()
    grad = lambda f: torch.autograd.grad(f(slots_of(x)).sum(), x["draft_MU"])[0]  # noqa: E731
    alpha_M1 = slots_of(x).alpha_M.detach()[:, None]
    torch.testing.assert_close(grad(lk), grad(tv) / alpha_M1, rtol=1e-4, atol=1e-7)
    weight_M1 = (-3 * alpha_M1).exp()
    torch.testing.assert_close(grad(lk_hybrid), weight_M1 * grad(kl) + (1 - weight_M1) * grad(tv), rtol=1e-4, atol=1e-7)
    p_MU = x["target_MV"].detach().softmax(-1)[:, IDS_U]
    mass_M1 = p_MU.sum(-1, keepdim=True)
    renormalised = torch.nn.functional.kl_div(x["draft_MU"].log_softmax(-1), p_MU / mass_M1, reduction="none").sum(-1)
    torch.testing.assert_close(grad(kl), mass_M1 * torch.autograd.grad(renormalised.sum(), x["draft_MU"])[0], rtol=1e-4, atol=1e-7)
    sure_MV = torch.full((M, V), -60.0).scatter_(1, IDS_U[LABELS_M.clamp(min=0)][:, None], 60.0)
    sure = slots_of({**x, "target_MV": sure_MV})
    known_M = LABELS_M >= 0
    torch.testing.assert_close(lk(sure)[known_M], LOSSES["ce"](sure)[known_M], rtol=1e-5, atol=1e-5)


def test_far_off_drafts_have_finite_losses_and_gradients():
    x = draw()
    x["draft_MU"] = (x["draft_MU"].detach() * 100).requires_grad_()
    x["target_MV"] = (x["target_MV"].detach() * 100).requires_grad_()
    for name, loss in LOSSES.items():
        loss_M = loss(slots_of(x))
        assert loss_M.isfinite().all(), name
        assert all(g is None or g.isfinite().all() for g in gradients(loss_M, x).values()), name


def test_the_menu_is_the_recipes_and_weights_add_up():
    assert typing.get_args(schema.LOSSES) == tuple(LOSSES)
    x = draw()
    weights = {name: 0.1 * (i + 1) for i, name in enumerate(LOSSES)}
    expected_M = sum(w * LOSSES[name](slots_of(x)) for name, w in weights.items())
    torch.testing.assert_close(combined(slots_of(x), weights), expected_M)
    assert torch.equal(combined(slots_of(x), {"soft_ce": 1.0}), soft_ce(slots_of(x)))


# ---- thinned slots (DraftHead.thin): each way to thin is tried, and the mean over all of them is what all slots give

STEPS = 3


def two_rows():
    """Answers of five and of three tokens: four and two loss slots at step 0."""
    g = torch.Generator().manual_seed(3)
    rows = []
    for i, (length, start) in enumerate([(9, 4), (7, 4)]):
        flags = torch.arange(length) >= start
        states = {"features_TF": torch.zeros(length - 1, 4), "final_TD": torch.zeros(length - 1, 4), "lse_T": torch.zeros(length - 1)}
        rows.append(Row(str(i), "c", torch.randint(0, V, (length,), generator=g), flags, **states))
    return align(rows, steps=STEPS, supervise="answers", max_len=99)


def thinnings(valid_BTJ):
    """Every choice of half of each row's slots at step 0, and of half of those, once for all deeper steps."""
    per_row = []
    for valid_TJ in valid_BTJ:
        slots = valid_TJ[:, 0].nonzero().flatten().tolist()
        few = len(slots) // 2
        per_row.append([(kept, deep) for kept in itertools.combinations(slots, few) for deep in itertools.combinations(kept, max(1, few // 2))])
    for choice in itertools.product(*per_row):
        kept_BTJ = torch.zeros_like(valid_BTJ)
        for b, (kept, deep) in enumerate(choice):
            kept_BTJ[b, list(kept), 0], kept_BTJ[b, list(deep), 1:] = True, True
        yield kept_BTJ


def weights_BTJ(aligned, train) -> torch.Tensor:
    """What the loss of each slot and step is multiplied with."""
    found = torch.zeros(STEPS, aligned.lse_BT.numel() + 1)
    for chunk in chunks_of(aligned, train, torch.ones(V, dtype=torch.bool), 3):
        for j in range(STEPS):
            found[j].index_add_(0, chunk.slots_JC[j], chunk.weights_JC[j])
    return found[:, :-1].T.view(*aligned.lse_BT.shape, STEPS)


@pytest.mark.parametrize("normalise", ["sequence", "token"])
def test_a_thinned_loss_has_the_expectation_of_the_whole(normalise):
    aligned = two_rows()
    train = TrainSection.model_validate({"normalise": normalise, "loss_decay": 0.5})
    whole_BTJ = weights_BTJ(aligned, train)
    mean_BTJ = torch.stack([weights_BTJ(replace(aligned, kept_BTJ=k), train) for k in thinnings(aligned.batch.valid_BTJ)]).mean(0)
    torch.testing.assert_close(mean_BTJ[..., 0], whole_BTJ[..., 0])
    # Deeper steps: a share of the kept slots is unrolled so far, and counts as that share: of the four-slot row 1 of 2, of the two-slot row 1 of 1.
    share_B11 = torch.tensor([0.5, 1.0])[:, None, None]
    torch.testing.assert_close(mean_BTJ[..., 1:], whole_BTJ[..., 1:] * share_B11)
    assert whole_BTJ[..., 1:].sum() > 0


def test_a_thinning_that_is_not_weighed_is_seen():
    aligned = two_rows()
    kept_BTJ = next(iter(thinnings(aligned.batch.valid_BTJ)))
    train = TrainSection.model_validate({"normalise": "token"})
    unweighed = replace(aligned, batch=replace(aligned.batch, valid_BTJ=aligned.batch.valid_BTJ & kept_BTJ))
    assert weights_BTJ(unweighed, train).sum() < 0.8 * weights_BTJ(replace(aligned, kept_BTJ=kept_BTJ), train).sum()


def test_metrics_of_thinned_slots_are_unbiased():
    """Per row, as rows are thinned to different shares: the sums over all thinnings are in the ratio of the whole row's."""
    aligned, g = two_rows(), torch.Generator().manual_seed(5)
    hits_BTJ = torch.rand(aligned.answers_BTJ.shape, generator=g) < 0.6
    known_V = torch.rand(V, generator=g) < 0.7
    for b in range(2):
        row = replace(aligned, labels_BTJ=aligned.labels_BTJ[b : b + 1], answers_BTJ=aligned.answers_BTJ[b : b + 1],
                      batch=replace(aligned.batch, valid_BTJ=aligned.batch.valid_BTJ[b : b + 1]))
        of = lambda kept_BTJ: metric_sums(torch.tensor(1.0), hits_BTJ[b : b + 1], replace(row, kept_BTJ=kept_BTJ), known_V)  # noqa: B023, E731
        whole, kept = of(None), [of(k) for k in thinnings(row.batch.valid_BTJ)]
        mean = {name: torch.stack([k[name] for k in kept]).mean(0) for name in whole}
        for part, base in (("hits", "answers"), ("prefix", "slots"), ("answers", "slots")):
            torch.testing.assert_close(mean[part] / mean[base], whole[part] / whole[base], equal_nan=True)
        torch.testing.assert_close(mean["known"] / mean["answers"][0], whole["known"] / whole["answers"][0])
        assert whole["hits"].sum() > 0
