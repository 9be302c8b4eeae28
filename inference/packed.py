"""Linear layers whose weights are packed once for oneDNN: on a CPU a verify pass of 5 tokens then costs about as much as one of 1.

MKL answers one token with a bandwidth-bound GEMV and two or more with a poor skinny GEMM (about twice the time), which is enough to make
speculative decoding lose. oneDNN on a weight in its own blocked layout has no such cliff (inductor's freezing does the same). The packed copy
replaces the weight; results move by rounding only (≤ 1e-4 on logits).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_pack() -> bool:
    """Whether this build of torch has the two oneDNN operators."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


class PackedLinear(nn.Module):
    """Inference only: y = x Wᵀ + b for float32 on the CPU. x [..., in], y [..., out]. Holds no parameters; nothing to save or train."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        # A plain attribute: the packed tensor is opaque (no storage), so it must not travel with .to() or state_dict.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(module: nn.Module) -> nn.Module:
    """Replace every float32 CPU nn.Linear inside `module` by a PackedLinear, in place, and return it (a new module if it is itself one).

    Other linears (other device or dtype, subclasses, a torch without the operators) stay as they are: F.linear computes the same.
    """
    if not can_pack():
        return module
    if _packable(module):
        return PackedLinear(module)  # type: ignore[arg-type]
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _packable(child):
                setattr(parent, name, PackedLinear(child))  # type: ignore[arg-type]
    return module


def _packable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32 and not module._forward_hooks
