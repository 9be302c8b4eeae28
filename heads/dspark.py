"""DSpark: DFlash's block, with a bias that depends on the token before, and a head that says how likely a draft is to be accepted.

    [x_{t+1}, MASK, …, MASK] ─ heads/block.py ─► h_0 … h_{P−1}
    step j:   w = W1[x_{t+1+j}]      lm_head h_j + W2 w ─► q(x_{t+2+j})      confidence [h_j; w] ─► logit of the acceptance

W1 [V, rank] and W2 [U, rank] are a low-rank table of which token follows which: the only thing that is sequential, and cheap. The token before is the
true one in training, the drafted parent in drafting, and the anchor at first. Unlike in DFlash, each position says what *follows* it, so that the
anchor's own position is step 0 and a block of P drafts P tokens (label_offsets in DeepSpec's training, vLLM's dspark proposer).

A state is cat[h, w], so that `logits` and `confidence` are functions of it alone. Drafting does not use the confidence yet: it is trained, saved and
measured only.

DeepSpec (https://github.com/deepseek-ai/DeepSpec), whose names the weights have: markov_head.markov_w1 and markov_w2, confidence_head.proj.

Shape suffixes: B rows, H hidden, S = H + rank, U draft vocabulary, V target's, W drafted tokens of one level.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, cat, nn

from draftheads.heads.block import BlockConfig, BlockHead
from draftheads.recipes.schema import MOST_DRAFTED, Geometry


class DSparkConfig(BlockConfig):
    type: Literal["dspark"] = "dspark"
    block_size: int = Field(7, ge=2, le=MOST_DRAFTED, description="anchor and masks, and as many drafted tokens")
    markov_rank: int = Field(256, ge=1)


class MarkovHead(nn.Module):
    """Starts as no bias at all, from rows of length about 1."""

    def __init__(self, V: int, U: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(V, rank)
        self.markov_w2 = nn.Linear(rank, U, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    def __init__(self, S: int) -> None:
        super().__init__()
        self.proj = nn.Linear(S, 1)
        nn.init.normal_(self.proj.weight, std=min(0.02, S**-0.5))
        nn.init.zeros_(self.proj.bias)


class DSpark(BlockHead):
    Config: ClassVar[type[DSparkConfig]] = DSparkConfig
    first_step: ClassVar[int] = 0

    def __init__(self, config: DSparkConfig, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__(config, geometry, draft_ids)
        self.markov_head = MarkovHead(geometry.vocab_size, len(self.d2t), config.markov_rank)
        self.confidence_head = ConfidenceHead(geometry.hidden_size + config.markov_rank)

    @classmethod
    def build(cls, config: DSparkConfig, geometry: Geometry, draft_ids: Tensor | None) -> DSpark:
        return cls(config.resolve(geometry), geometry, draft_ids)

    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        h, w = states.split([self.geometry.hidden_size, self.config.markov_rank], -1)
        found: Tensor = self.lm_head(h) + self.markov_head.markov_w2(w)
        return found

    def confidence(self, states: Tensor) -> Tensor:
        found: Tensor = self.confidence_head.proj(states)[..., 0]
        return found

    def state(self, h: Tensor, previous: Tensor) -> Tensor:
        return cat([h, self.markov_head.markov_w1(previous).to(h.dtype)], -1)

    def follow(self, base_B1U: Tensor, tokens_BW: Tensor) -> Tensor:
        return base_B1U + self.markov_head.markov_w2(self.markov_head.markov_w1(tokens_BW))

    def engine_config(self) -> dict[str, Any]:
        """DeepSpec's keys beside DFlash's."""
        found, c = super().engine_config(), self.config
        return {**found, "architectures": ["Qwen3DSparkModel"], **found["dflash_config"], "num_anchors": c.anchors, "markov_rank": c.markov_rank,
                "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
