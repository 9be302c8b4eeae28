"""DFlash: a block of masks behind the newest token, filled in one forward by a few layers that read the target's tapped states as context.

    [x_{t+1}, MASK_1, …, MASK_{P−1}] ─ layers over the context of pairs s ≤ t (heads/block.py) ─ norm ─ lm_head ─► MASK_k: q(x_{t+1+k})

MASK_k says which token it hides, hence unroll step j is block position j + 1, and a block of P drafts P − 1 tokens. What it says does not depend on
what is drafted before it: all nodes of a tree's level have the same logits.

arXiv 2602.06036. The loss of position k weighs exp(−(k−1)/γ) there, γ = 7, 5, 4 for blocks of 16, 10, 8: train.loss_decay = exp(−1/γ). Names
of the weights are those that vLLM's and SGLang's dflash loaders read (fc, hidden_norm, layers.{i}.*, norm, d2t, t2d).

Shape suffixes: B rows, U draft vocabulary, W drafted tokens of one level.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from draftheads.heads.block import BlockConfig, BlockHead
from draftheads.recipes.schema import Geometry


class DFlashConfig(BlockConfig):
    type: Literal["dflash"] = "dflash"


class DFlash(BlockHead):
    Config: ClassVar[type[DFlashConfig]] = DFlashConfig
    first_step: ClassVar[int] = 1

    @classmethod
    def build(cls, config: DFlashConfig, geometry: Geometry, draft_ids: Tensor | None) -> DFlash:
        return cls(config.resolve(geometry), geometry, draft_ids)

    def state(self, h: Tensor, previous: Tensor) -> Tensor:
        return h

    def follow(self, base_B1U: Tensor, tokens_BW: Tensor) -> Tensor:
        return base_B1U.expand(-1, tokens_BW.shape[1], -1)
