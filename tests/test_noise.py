"""Counter-based noise: reproducible, independent of batch-mates, and of the distributions it claims."""

from __future__ import annotations

import math

import pytest
import torch

from draftheads.inference.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, Noise

POSITIONS = torch.arange(2000)[None]


def test_a_row_does_not_depend_on_its_mates() -> None:
    seeds, positions = torch.tensor([7, -3, 2**40]), torch.tensor([[5, 6], [5, 9], [0, 2**33]])
    together = Noise(seeds, torch.tensor([4, 4, 8])).gumbel(positions, DRAFT, 50)
    for b in range(3):
        alone = Noise(seeds[b : b + 1], torch.tensor([[4, 4, 8][b]])).gumbel(positions[b : b + 1], DRAFT, 50)
        assert torch.equal(together[b], alone[0])


@pytest.mark.parametrize("change", ["seed", "high seed bits", "position", "purpose"])
def test_every_part_of_the_key_matters(change: str) -> None:
    base = Noise(torch.tensor([1])).gumbel(POSITIONS, TARGET, 16)
    other = {
        "seed": lambda: Noise(torch.tensor([2])).gumbel(POSITIONS, TARGET, 16),
        "high seed bits": lambda: Noise(torch.tensor([1 + 2**40])).gumbel(POSITIONS, TARGET, 16),
        "position": lambda: Noise(torch.tensor([1])).gumbel(POSITIONS + 1, TARGET, 16),
        "purpose": lambda: Noise(torch.tensor([1])).gumbel(POSITIONS, RESIDUAL, 16),
    }[change]()
    correlation = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(base.numel())


def test_no_number_is_shared_between_neighbouring_positions_and_purposes() -> None:
    """Keys that are sums (position + purpose) share numbers between neighbours, and the first index of a Gumbel with a uniform."""
    seeds, positions = torch.arange(3000), torch.arange(8).expand(3000, -1)
    noise = Noise(seeds, torch.zeros_like(seeds))
    drawn = [noise.gumbel(positions, purpose, 3).flatten(1) for purpose in (TARGET, DRAFT, ACCEPT, RESIDUAL)]
    correlation = torch.corrcoef(torch.cat(drawn, 1).T).fill_diagonal_(0).abs()
    assert correlation.max() < 5.5 / math.sqrt(3000)


def test_only_draft_and_accept_numbers_are_fresh_in_every_round() -> None:
    """The target's own draw of a position must be the same in every round: that is what equals autoregressive sampling."""
    one, two = (Noise(torch.tensor([1]), torch.tensor([r])) for r in (10, 11))
    for purpose, same in ((TARGET, True), (RESIDUAL, True), (DRAFT, False), (ACCEPT, False)):
        assert torch.equal(one.uniform(POSITIONS, purpose), two.uniform(POSITIONS, purpose)) is same


def test_uniform_is_open_and_uniform() -> None:
    u = Noise(torch.tensor([3])).uniform(torch.arange(200_000)[None], ACCEPT)
    assert 0 < u.min() and u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    chi2 = ((counts - len(u[0]) / 64) ** 2 / (len(u[0]) / 64)).sum()
    assert chi2 < 63 + 4 * math.sqrt(2 * 63)


def test_gumbel_argmax_draws_from_p() -> None:
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    g = Noise(torch.tensor([11])).gumbel(torch.arange(100_000)[None], TARGET, 6)[0]
    assert g.isfinite().all()
    expected = p * 100_000
    chi2 = ((torch.bincount((p.log() + g).argmax(-1), minlength=6) - expected) ** 2 / expected).sum()
    assert chi2 < 25.7  # p-value 1e-4 at 5 degrees of freedom
    assert abs(g.mean() - 0.57722) < 0.01 and abs(g.var() - math.pi**2 / 6) < 0.02
