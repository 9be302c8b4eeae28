"""Linear layers in int8 for the *draft* on a CPU: weights per output row, activations per token. Never for the target, whose numbers count.

A draft step reads all of the head's weights for one token, so its time is the memory's: a quarter of the bytes is a quarter of the time or
better (small layers stay in the cache). Rounding moves a linear's output by 1.5 % of its norm, which costs the draft a few of its argmaxes and
the output nothing, since the target verifies; sampled drafts carry the q of these very logits.

torch's dynamic quantisation scales the whole batch by one range, so that a row's draft would depend on its batch-mates. Here each token is
brought to [−1, 1] first and the range is fixed. It is 7 bits wide: with 8, the int16 sums of CPUs without VNNI would saturate.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

_STEPS = 63


class Int8Linear(nn.Module):
    """Inference only: y ≈ x Wᵀ for float32 on the CPU, x [..., I] → [..., O]. No parameters; nothing to save or train."""

    in_features: int
    out_features: int
    _packed: Any

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert linear.bias is None, "int8 layers have no bias"
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight_OI = linear.weight.detach().float()
        scale_O = (weight_OI.abs().amax(1) / 127).clamp(min=1e-12).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch points to torchao, which is another dependency
            zero_O = torch.zeros(len(weight_OI), dtype=torch.long)
            quantised_OI = torch.quantize_per_channel(weight_OI, scale_O, zero_O, 0, torch.qint8)
            # A plain attribute: an opaque object that must not travel with .to() or state_dict.
            self._packed = torch.ops.quantized.linear_prepack(quantised_OI, None)

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x / largest, 1 / _STEPS, _STEPS + 1, self._packed)
        return y.mul_(largest)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_int8() -> bool:
    """Whether this build of torch, on this processor, has the operators and computes the right thing with them."""
    linear = nn.Linear(32, 8, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.linspace(-1, 1, 256).view(8, 32).roll(3, 0))
    x = torch.linspace(-2, 3, 64).view(2, 32)
    try:
        with torch.no_grad():
            return bool(torch.allclose(Int8Linear(linear)(x), linear(x), atol=0.5))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def int8_linears(module: nn.Module) -> nn.Module:
    """Replace every nn.Linear without bias inside `module` by an Int8Linear, in place, and return it."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.bias is None:
                setattr(parent, name, Int8Linear(child))
    return module
