"""Muon: orthogonal steps for matrices, exactly torch's AdamW for the rest, a state that resumes to the bit."""

import copy

import pytest
import torch
from torch import nn

from draftheads.recipes.schema import TrainSection
from draftheads.train.optimizers import Muon, make_optimizer, orthogonalise


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(8))]


def steps(found: list[nn.Parameter], optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for n in numbers:
        generator = torch.Generator().manual_seed(n)
        for p in found:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("shape", [(16, 16), (40, 8), (8, 40)])
def test_orthogonalise_keeps_directions_and_levels_the_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    found = u.mT @ orthogonalise(u @ torch.diag(s) @ v) @ v.mT
    assert (found - torch.diag(found.diagonal())).abs().max() < 1e-3
    assert found.diagonal().min() > 0.5
    assert found.diagonal().max() < 1.4


def test_vectors_take_the_steps_of_adamw_and_matrices_do_not() -> None:
    ours, theirs = parameters(), parameters()
    train = TrainSection(optimizer="muon", lr=0.01, muon_lr=0.02, weight_decay=0.1)
    steps(ours, make_optimizer(ours, train), range(5))
    steps(theirs, make_optimizer(theirs, train.model_copy(update={"optimizer": "adamw"})), range(5))
    torch.testing.assert_close(ours[2], theirs[2], atol=1e-6, rtol=1e-5)
    assert (ours[0] - theirs[0]).abs().max() > 1e-3


def test_the_groups_carry_the_scale_that_the_loop_multiplies_the_schedule_with() -> None:
    muon = make_optimizer(parameters(), TrainSection(optimizer="muon", lr=0.001, muon_lr=0.02))
    assert [(g["muon"], pytest.approx(g["lr_scale"])) for g in muon.param_groups] == [(True, 20.0), (False, 1.0)]
    adam = make_optimizer(parameters(), TrainSection())
    assert isinstance(adam, torch.optim.AdamW)
    assert {g["lr_scale"] for g in adam.param_groups} == {1.0}


def test_state_resumes_to_the_bit() -> None:
    whole, half = parameters(), parameters()
    train = TrainSection(optimizer="muon", lr=0.01)
    steps(whole, make_optimizer(whole, train), range(10))
    first = make_optimizer(half, train)
    steps(half, first, range(5))
    second = make_optimizer(half, train)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert isinstance(second, Muon)
    steps(half, second, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(whole, half, strict=True))
