"""Taps: tap k is transformers' hidden_states[k], the output of layer k−1 (0: what enters layer 0); "final" is the post-norm state that lm_head
reads. The last layer's raw output has no number, since hidden_states[num_layers] is the post-norm state.

Shape suffixes: B rows, T tokens, D hidden, F feature width (taps · D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.recipes.schema import RecipeError

Taps = tuple[int | str, ...]


class Tapped:
    """Hooks on the tapped layers only, for the duration of one forward."""

    def __init__(self, layers: nn.ModuleList, taps: Taps) -> None:
        self.layers, self.taps = layers, taps
        self.states: dict[int | str, Tensor] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> Tapped:
        for tap in self.taps:
            if tap == "final":
                continue
            if not isinstance(tap, int) or not 0 <= tap < len(self.layers):
                raise RecipeError(f'tap {tap!r} does not exist: taps are 0 … {len(self.layers) - 1} (tap k: output of layer k−1) and "final"')
            if tap == 0:
                self.handles.append(self.layers[0].register_forward_pre_hook(self._entering, with_kwargs=True))
            else:
                self.handles.append(self.layers[tap - 1].register_forward_hook(self._leaving(tap)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _entering(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.states[0] = positional[0] if positional else named["hidden_states"]

    def _leaving(self, tap: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self.states[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def features(self, final_BTD: Tensor) -> Tensor | None:
        if not self.taps:
            return None
        return torch.cat([final_BTD if tap == "final" else self.states[tap] for tap in self.taps], -1)
