"""Linear layers whose weights are packed once for oneDNN: on a CPU a verify pass of 5 tokens then costs about as much as one of 1.

MKL answers one token with a bandwidth-bound GEMV and two or more with a poor skinny GEMM (about twice the time), which is enough to make
speculative decoding lose. oneDNN on a weight in its own blocked layout has no such cliff (inductor's freezing does the same). The packed copy
replaces the weight; results move by rounding only (≤ 1e-4 on logits).

Linears that read the same tensor (query/key/value, gate/up) are found by watching one forward, not by name, and become one product whose
output they slice: 4 % of a small model's forward.

Shape suffixes: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def can_pack() -> bool:
    """Whether this build of torch has the two oneDNN operators."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


class Packed:
    """A weight in oneDNN's layout. Not a module: the packed tensor is opaque (no storage), so it must not travel with .to() or state_dict."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.in_features = weight_OI.shape[1]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), None)
        self.bias_O = None if bias_O is None else bias_O.detach().clone()
        self.x: Tensor | None = None  # PackedSlice's memory of the product that its siblings share
        self.y: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias_O, "none", [], "")


class PackedLinear(nn.Module):
    """Inference only: y = x Wᵀ + b for float32 on the CPU. x [..., I], y [..., O]. Holds no parameters; nothing to save or train."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = Packed(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedSlice(nn.Module):
    """One of several linears with the same input: the first computes the product for all, the others take their columns."""

    def __init__(self, product: Packed, start: int, stop: int, first: bool, last: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = product.in_features, stop - start
        self.product, self.start, self.stop, self.first, self.last = product, start, stop, first, last

    def forward(self, x: Tensor) -> Tensor:
        product = self.product
        y = product.y
        # `is`, not equality: the first one always computes, so a stale product can only be met by a caller that skipped it.
        if y is None or self.first or product.x is not x:
            product.x, product.y = x, (y := product(x))
        if self.last:
            product.x = product.y = None
        return y[..., self.start : self.stop]

    def extra_repr(self) -> str:
        return f"columns={self.start}:{self.stop}"


@torch.no_grad()
def pack_linears(module: nn.Module, run: Callable[[], object] | None = None) -> nn.Module:
    """Replace every float32 CPU nn.Linear inside `module` by a packed one, in place, and return it (a new module if it is itself one).

    run: one forward through `module`; given, linears that share their input are joined. Other linears (other device or dtype, subclasses, a
    torch without the operators) stay as they are: they compute the same.
    """
    if not can_pack():
        return module
    if _packable(module):
        return PackedLinear(module)  # type: ignore[arg-type]
    parents = {id(child): (parent, name) for parent in module.modules() for name, child in parent.named_children() if _packable(child)}
    new: dict[int, nn.Module] = {}
    for group in _sharing(module, run) if run is not None else ():
        biases = [linear.bias for linear in group]
        bias_O = torch.cat([b for b in biases if b is not None]) if all(b is not None for b in biases) else None
        product = Packed(torch.cat([linear.weight for linear in group]), bias_O)
        start = 0
        for i, linear in enumerate(group):
            new[id(linear)] = PackedSlice(product, start, start + linear.out_features, i == 0, i == len(group) - 1)
            start += linear.out_features
    for child, (parent, name) in parents.items():
        setattr(parent, name, new[child] if child in new else PackedLinear(getattr(parent, name)))
    return module


def _sharing(module: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Linears called once, one directly after the other, with the very same input tensor, all with or all without a bias."""
    calls: list[tuple[nn.Linear, Tensor]] = []  # keeps the inputs alive, so that no two share an id
    handles = [
        child.register_forward_pre_hook(lambda linear, inputs: calls.append((linear, inputs[0])))
        for child in module.modules()
        if _packable(child)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    counts: dict[int, int] = {}
    for linear, _ in calls:
        counts[id(linear)] = counts.get(id(linear), 0) + 1
    groups: list[list[nn.Linear]] = []
    before: Tensor | None = None
    for linear, x in calls:
        if counts[id(linear)] == 1 and x is before and (groups[-1][-1].bias is None) == (linear.bias is None):
            groups[-1].append(linear)
        elif counts[id(linear)] == 1:
            groups.append([linear])
        before = x if counts[id(linear)] == 1 else None
    return [group for group in groups if len(group) > 1]


def _packable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32 and not module._forward_hooks
