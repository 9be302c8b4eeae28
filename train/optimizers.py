"""The optimizers of `train.optimizer`: AdamW, or Muon for the matrices with AdamW for the rest.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest orthogonal one, found by five
Newton–Schulz steps. On small data it learns more from the same passes: 0.345 against AdamW's 0.303 of first drafts right after three
epochs of 49k answer tokens (benchmarks/RESULTS.md). torch.optim.Muon computes those steps in bfloat16, which CPUs without bf16 units do
some 60 times slower than float32, and takes matrices only; hence this one: float32, one optimizer for all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.recipes.schema import TrainSection

MOMENTUM, STEPS = 0.95, 5


def make_optimizer(parameters: list[nn.Parameter], train: TrainSection, adapter: Sequence[nn.Parameter] = ()) -> torch.optim.Optimizer:
    """Only matrices decay. Each group carries `lr_scale`: the loop sets its rate to scale · the schedule's.

    adapter: the target's (train.lora): AdamW without decay at train.lora.lr, whatever optimizer the head has."""
    matrices, vectors = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    muon = train.optimizer == "muon"
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay, "muon": muon, "lr_scale": train.muon_lr / train.lr if muon else 1.0},
        {"params": vectors, "weight_decay": 0.0, "muon": False, "lr_scale": 1.0},
    ]
    if adapter and train.lora is not None:
        rate = train.lr / 4 if train.lora.lr is None else train.lora.lr
        groups.append({"params": list(adapter), "weight_decay": 0.0, "muon": False, "lr_scale": rate / train.lr})
    groups = [g for g in groups if g["params"]]
    return Muon(groups, lr=train.lr, betas=train.betas) if muon else torch.optim.AdamW(groups, lr=train.lr, betas=train.betas)


def orthogonalise(matrix: Tensor) -> Tensor:
    """The quintic Newton–Schulz iteration in float32: singular values of `matrix` [N, M] all become about 1."""
    x = matrix.float()
    x = x.mT if (tall := x.shape[-2] > x.shape[-1]) else x
    x = x / (x.norm() + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Groups with `muon: True` hold matrices and get Muon steps (Nesterov momentum 0.95, scaled by √max(1, rows/columns)); the others AdamW."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0, "muon": False, "lr_scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            update = self._muon if group["muon"] else self._adam
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update(parameter, group)
        return loss

    def _muon(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(grad, 1 - MOMENTUM)
        rows, columns = parameter.shape
        parameter.add_(orthogonalise(grad.lerp(momentum, MOMENTUM)).to(parameter.dtype), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)

    def _adam(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, grad, (b1, b2) = self.state[parameter], parameter.grad, group["betas"]
        assert grad is not None
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - b1)
        state["exp_avg_sq"].lerp_(grad * grad, 1 - b2)
        rms = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], rms, value=-group["lr"] / (1 - b1 ** state["step"]))
