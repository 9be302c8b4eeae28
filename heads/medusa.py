"""Medusa-1: several heads on the target's last state, each of which guesses another position, all at once and apart from each other.

    f_t, what the target's lm_head reads ─┬─ blocks 0 ─ lm_head 0 ─► q(x_{t+2})
                                          ├─ blocks 1 ─ lm_head 1 ─► q(x_{t+3})
                                          └─ …                            block: x + SiLU(W x + b)

The target itself guesses x_{t+1} from f_t, hence head j is unroll step j. Blocks begin as the identity and lm_heads as the target's rows: at first
each head says what the target says of x_{t+1}. No head reads the tokens drafted before it, so that all nodes of a level get the same logits.

arXiv 2401.10774. The original uses one block's weights for all blocks of a head; here each has its own, which is the same for one block a head.

Shape suffixes: B rows, T slots, M new pairs, H hidden (D in base.py), F feature width (H: one tap), U draft vocabulary, V target's, W drafted tokens
of one level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, DraftHead, Unrolled
from draftheads.heads.config import HeadConfig
from draftheads.heads.layers import ResBlock, borrow_rows, lm_head
from draftheads.recipes.schema import Geometry, RecipeError


class MedusaConfig(HeadConfig):
    type: Literal["medusa"] = "medusa"
    freeze_lm_head: bool = Field(False, description="true: all heads share the target's lm_head rows, only the blocks are trained")
    medusa_num_heads: int = Field(4, ge=1, description="how many tokens a draft has at most")
    medusa_num_layers: int = Field(1, ge=1, description="residual blocks of each head")

    def resolve(self, geometry: Geometry) -> Self:
        found = super().resolve(geometry)
        if len(found.taps or ()) != 1:
            raise RecipeError(f"head.taps: Medusa reads one tap, found {list(found.taps or ())}; leave taps out to read the target's final state")
        return found


@dataclass(eq=False)
class MedusaState:
    """last_BH: each row's feature of its last pair, which is all that drafting reads. depth: levels that the present draft has beyond its first."""

    last_BH: Tensor
    depth: int = 0


class Medusa(DraftHead):
    Config: ClassVar[type[MedusaConfig]] = MedusaConfig
    config: MedusaConfig
    like: Tensor

    def __init__(self, config: MedusaConfig, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__()
        assert config.taps is not None and config.hidden_size is not None, "Medusa wants a resolved config: use heads.build_head"
        H, heads = config.hidden_size, config.medusa_num_heads
        self.config, self.geometry, self.taps, self.max_depth = config, geometry, config.taps, heads
        U = self.set_vocabulary(draft_ids, config.draft_vocab_size)
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(H) for _ in range(config.medusa_num_layers))) for _ in range(heads))
        frozen = config.freeze_lm_head
        self.lm_heads = nn.ModuleList(lm_head(H, U, frozen=frozen) for _ in range(1 if frozen else heads))
        # Has the head's dtype and device: no weight is left to ask when linears are packed for inference.
        self.register_buffer("like", torch.zeros(()), persistent=False)

    @classmethod
    def build(cls, config: MedusaConfig, geometry: Geometry, draft_ids: Tensor | None) -> Medusa:
        return cls(config.resolve(geometry), geometry, draft_ids)

    def borrow(self, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        """Medusa reads no embedding. Trained lm_heads start from the target's rows, once: while they are NaN."""
        rows_UH = self.rows_UD(lm_head_VD)
        for layer in self.lm_heads:
            assert isinstance(layer, nn.Linear)
            borrow_rows(layer, rows_UH, self.like)

    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        found: Tensor = self.lm_heads[0 if self.config.freeze_lm_head else step](states)
        return found

    def engine_config(self) -> dict[str, Any]:
        """config.json as vLLM and the original read it. vLLM takes the number of heads from any key with "num" and "heads" in it (so there must be
        no second one), and drops the blocks' biases without medusa_fc_bias."""
        c, V, U = self.config, self.geometry.vocab_size, len(self.d2t)
        return {
            "architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": c.medusa_num_heads,
            "medusa_num_layers": c.medusa_num_layers, "medusa_fc_bias": True, "original_lm_head": c.freeze_lm_head,
            "hidden_size": c.hidden_size, "vocab_size": V, "max_position_embeddings": c.max_positions,
            **({"truncated_vocab_size": U, "draft_vocab_size": U} if U < V else {}),
            "torch_dtype": str(self.like.dtype).removeprefix("torch."),
        }

    # ---- training

    def check_steps(self, steps: int) -> None:
        heads = self.config.medusa_num_heads
        if steps > heads:
            raise RecipeError(f"train.unroll asks for {steps} steps, head.medusa_num_heads is {heads}: each step is a head, lower steps or raise it")

    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        self.check_steps(steps)
        f_BTH = batch.features_BTF.to(self.like.dtype)
        return Unrolled([self.blocks[j](f_BTH) for j in range(steps)])

    # ---- drafting

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> MedusaState:
        # An ordinary tensor even when the caller is in inference mode, so that the state may be used outside it too.
        with torch.inference_mode(False), torch.no_grad():
            return MedusaState(torch.zeros(batch, self.config.hidden_size or 0, device=self.like.device, dtype=self.like.dtype))

    def clear(self, state: MedusaState, row: int) -> None:
        state.last_BH[row] = 0

    def move(self, state: MedusaState, source: int, to: int) -> None:
        state.last_BH[to] = state.last_BH[source]

    @torch.no_grad()
    def extend(self, state: MedusaState, features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        """Only each row's last new pair counts; a row without news keeps its own."""
        counts_B11 = counts_B.to(features_BMF.device)[:, None, None]
        last_B1F = features_BMF.gather(1, (counts_B11 - 1).clamp(min=0).expand(-1, 1, features_BMF.shape[-1]))
        state.last_BH[rows] = torch.where(counts_B11[:, 0] > 0, last_B1F[:, 0].to(state.last_BH), state.last_BH[rows])

    @torch.no_grad()
    def begin(self, state: MedusaState, rows: slice, depth: int | None = None) -> Tensor:
        state.depth = 0
        return self._level(state, rows)

    @torch.no_grad()
    def step(self, state: MedusaState, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        state.depth += 1
        if state.depth >= len(self.blocks):
            raise ValueError(f"{len(self.blocks)} Medusa heads draft no level {state.depth + 1}")
        return self._level(state, rows)[:, None].expand(-1, tokens_BW.shape[1], -1)

    def _level(self, state: MedusaState, rows: slice) -> Tensor:
        """The logits [B, U] of the next level."""
        return self.logits(self.blocks[state.depth](state.last_BH[rows]), state.depth)
