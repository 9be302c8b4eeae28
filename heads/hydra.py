"""Hydra and Hydra++: Medusa's heads, each of which also reads the tokens drafted before it.

    f_t ─ [prefix layer: Hydra++] ─► h_t ─┐
                      e(x_{t+1}) ─────────┼─ blocks 0 ─ lm_head 0 ─► q(x_{t+2})
                      e(x_{t+2}) ─────────┼─ blocks 1 ─ lm_head 1 ─► q(x_{t+3})         head i reads cat[h_t, e(x_{t+1}), …, e(x_{t+1+i})]
                      …

The first block of head i takes its (i+2)·H inputs to H: R x + SiLU(W x + b); blocks after it are Medusa's. R starts by picking h_t out and all W as
zero, so that each head begins as the target's own guess of x_{t+1}. Head i is unroll step i. The prefix layer is one decoder layer over the f_t of
all slots s ≤ t, slot t at RoPE position t, with a norm behind it.

arXiv 2402.05109. The original starts R at random and its lm_heads have a bias; here they have one only where asked (lm_head_bias), as the target's
has none.

Shape suffixes: B rows, T slots, M new pairs, H hidden (D in base.py), F feature width (H: one tap), U draft vocabulary, V target's, X = (i+2)·H, K
key/value heads, Q folded queries, D head dimension, W drafted tokens of one level.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, DraftHead, Unrolled
from draftheads.heads.config import LayerConfig
from draftheads.heads.layers import (
    Layer,
    Norm,
    ResBlock,
    attend_unrolled,
    borrow_embedding,
    borrow_rows,
    causal_mask,
    lm_head,
    nan_table,
    over_groups,
    target_rotary,
)
from draftheads.heads.slots import DraftSlots
from draftheads.recipes.schema import Geometry, RecipeError


class HydraConfig(LayerConfig):
    """num_heads, num_kv_heads, head_dim and intermediate_size are the prefix layer's."""

    type: Literal["hydra"] = "hydra"
    freeze_lm_head: bool = Field(False, description="true: all heads share the target's lm_head rows")
    hydra_num_heads: int = Field(4, ge=1, description="how many tokens a draft has at most")
    hydra_num_layers: int = Field(1, ge=1, description="blocks of each head, the one that reads the tokens included (Hydra++: 4)")
    prefix_layer: bool = Field(False, description="Hydra++: a decoder layer over the target's states first")
    lm_head_bias: bool = Field(False, description="a bias of each lm_head, zero at first, as in the published heads")

    def resolve(self, geometry: Geometry) -> Self:
        found = super().resolve(geometry)
        if len(found.taps or ()) != 1:
            raise RecipeError(f"head.taps: Hydra reads one tap, found {list(found.taps or ())}; leave taps out to read the target's final state")
        if self.lm_head_bias and self.freeze_lm_head:
            raise RecipeError("head.lm_head_bias needs lm_heads of the head's own, head.freeze_lm_head is true: set one of them to false")
        return found


class FirstBlock(nn.Module):
    """R x + SiLU(W x + b) from X = parts·H to H; at first it returns the first H of its inputs. Named as in the original."""

    def __init__(self, H: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * H, H)
        self.res_connection = nn.Linear(parts * H, H)
        for p in self.parameters():
            nn.init.zeros_(p)
        with torch.no_grad():
            self.res_connection.weight.copy_(torch.eye(H, parts * H))

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


@dataclass(eq=False)
class HydraState:
    """slots: keys and values of the prefix layer, None without one. Of each row's last pair: last_BH, its h, and token_B, its token.

    level_BWX: what the heads read at the last level of the draft: cat[h, embeddings of the path's tokens] of each of its nodes."""

    slots: DraftSlots | None
    last_BH: Tensor
    token_B: Tensor
    level_BWX: Tensor | None = None


class Hydra(DraftHead):
    Config: ClassVar[type[HydraConfig]] = HydraConfig
    config: HydraConfig
    embed_VD: Tensor
    like: Tensor

    def __init__(self, config: HydraConfig, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__()
        assert config.taps is not None and config.hidden_size is not None, "Hydra wants a resolved config: use heads.build_head"
        c, H, V, eps = config, config.hidden_size, geometry.vocab_size, geometry.rms_norm_eps
        self.config, self.geometry, self.taps, self.max_depth = config, geometry, config.taps, config.hydra_num_heads
        U = self.set_vocabulary(draft_ids, c.draft_vocab_size)
        self.prefix_layer: Layer | None = None
        if c.prefix_layer:
            self.prefix_layer = Layer(H, c.intermediate_size or 0, c.num_heads or 0, c.num_kv_heads or 0, c.head_dim or 0, eps)
            for module in self.prefix_layer.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=min(0.02, module.in_features**-0.5))
            self.prefix_norm = Norm(H, eps)
            # In a tuple, hence no submodule: .to(bfloat16) would round its frequencies.
            self._rotary = (target_rotary(c.head_dim or 0, geometry),)
        more = c.hydra_num_layers - 1
        self.hydra_mlp = nn.ModuleList(nn.Sequential(FirstBlock(H, i + 2), *(ResBlock(H) for _ in range(more))) for i in range(c.hydra_num_heads))
        heads = 1 if c.freeze_lm_head else c.hydra_num_heads
        self.hydra_lm_head = nn.ModuleList(lm_head(H, U, frozen=c.freeze_lm_head, bias=c.lm_head_bias) for _ in range(heads))
        self.register_buffer("embed_VD", nan_table(V, H), persistent=False)
        # Has the head's dtype and device: no weight is left to ask when linears are packed for inference.
        self.register_buffer("like", torch.zeros(()), persistent=False)

    @classmethod
    def build(cls, config: HydraConfig, geometry: Geometry, draft_ids: Tensor | None) -> Hydra:
        return cls(config.resolve(geometry), geometry, draft_ids)

    def borrow(self, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        """Trained lm_heads start from the target's rows, once: while they are NaN."""
        borrow_embedding(self, embed_VD, self.like)
        rows_UH = self.rows_UD(lm_head_VD)
        for layer in self.hydra_lm_head:
            assert isinstance(layer, nn.Linear)
            borrow_rows(layer, rows_UH, self.like)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed_VD).to(self.like.dtype)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] → cos, sin [B, T, D]."""
        cos, sin = self._rotary[0](self.like, positions)
        return cos, sin

    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        found: Tensor = self.hydra_lm_head[0 if self.config.freeze_lm_head else step](states)
        return found

    def engine_config(self) -> dict[str, Any]:
        """config.json with the keys of the original; no engine reads Hydra."""
        c = self.config
        layer = {"intermediate_size": c.intermediate_size, "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
                 "head_dim": c.head_dim, "rms_norm_eps": self.geometry.rms_norm_eps, "rope_parameters": self.geometry.rope_parameters}
        return {
            "architectures": ["HydraModel"], "model_type": "hydra", "hydra_num_heads": c.hydra_num_heads, "hydra_num_layers": c.hydra_num_layers,
            "hydra_head_arch": "prefix-mlp" if c.prefix_layer else "mlp", "grounded_heads": True, "hidden_state_offset": 0,
            "hidden_size": c.hidden_size, "vocab_size": self.geometry.vocab_size, "draft_vocab_size": len(self.d2t),
            "max_position_embeddings": c.max_positions, "freeze_lm_head": c.freeze_lm_head, "lm_head_bias": c.lm_head_bias,
            **(layer if c.prefix_layer else {}),
            "torch_dtype": str(self.like.dtype).removeprefix("torch."),
        }

    # ---- training

    @torch.no_grad()
    def fit_start(self, batches: Iterable[DraftBatch]) -> None:
        """The prefix layer's norm starts with the size of the states: the heads then begin as the target's guess, not as a much flatter one."""
        if self.prefix_layer is None:
            return
        rms: list[Tensor] = []
        for batch in batches:
            rms.append(batch.features_BTF[batch.documents_BT >= 0].square().mean(-1).sqrt())
            if sum(map(len, rms)) >= 512:
                break
        if any(map(len, rms)):
            self.prefix_norm.weight.fill_(torch.cat(rms).mean())

    def check_steps(self, steps: int) -> None:
        heads = self.config.hydra_num_heads
        if steps > heads:
            raise RecipeError(f"train.unroll asks for {steps} steps, head.hydra_num_heads is {heads}: each step is a head, lower steps or raise it")

    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        self.check_steps(steps)
        x_BTX = batch.features_BTF.to(self.like.dtype)
        if self.prefix_layer is not None:
            attention, f_BTH = self.prefix_layer.self_attn, x_BTX
            cos_BTD, sin_BTD = self.cos_sin(batch.positions_BT)
            n_BTH = self.prefix_layer.inputs(f_BTH)
            k_BKTD, v_BKTD = attention.key_value(n_BTH, (cos_BTD[:, None], sin_BTD[:, None]))
            q_BKQD = attention.query(n_BTH, (cos_BTD[:, None, None], sin_BTD[:, None, None]))
            a_BKQD = attend_unrolled(q_BKQD, [k_BKTD], [v_BKTD], causal_mask(batch.documents_BT))
            x_BTX = self.prefix_norm(self.prefix_layer.finish(attention.output(a_BKQD, f_BTH.shape[1]), f_BTH))
        states: list[Tensor] = []
        for j in range(steps):
            x_BTX = torch.cat([x_BTX, self.embed(batch.tokens_BTJ[..., j])], -1)
            states.append(self.hydra_mlp[j](x_BTX))
        return Unrolled(states)

    # ---- drafting

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> HydraState:
        """The prefix layer sees committed pairs only: its slots have no room for drafts."""
        c, like = self.config, self.like
        slots = None if self.prefix_layer is None else DraftSlots(batch, max_len, 0, c.num_kv_heads or 0, c.head_dim or 0, like, self.cos_sin)
        # Ordinary tensors even when the caller is in inference mode, so that the state may be used outside it too.
        with torch.inference_mode(False), torch.no_grad():
            last_BH = torch.zeros(batch, c.hidden_size or 0, device=like.device, dtype=like.dtype)
            return HydraState(slots, last_BH, torch.zeros(batch, dtype=torch.int64, device=like.device))

    def clear(self, state: HydraState, row: int) -> None:
        if state.slots is not None:
            state.slots.clear(row)

    def move(self, state: HydraState, source: int, to: int) -> None:
        if state.slots is not None:
            state.slots.move(source, to)
        state.last_BH[to] = state.last_BH[source]
        state.token_B[to] = state.token_B[source]

    @torch.no_grad()
    def extend(self, state: HydraState, features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        """Keys and values of all new pairs; all else only for each row's last one. A row without news keeps its own."""
        f_BMH = features_BMF.to(state.last_BH)
        counts_B1 = counts_B.to(f_BMH.device)[:, None]
        at_B1 = (counts_B1 - 1).clamp(min=0)
        last_B1H = f_BMH.gather(1, at_B1[..., None].expand(-1, 1, f_BMH.shape[-1]))
        if state.slots is not None:
            counts = state.slots.counts(rows, counts_B)
            if counts is not None and not any(counts):
                return
            last_B1H = self._prefix(state.slots, f_BMH, last_B1H, counts_B, counts, rows)
        state.last_BH[rows] = torch.where(counts_B1 > 0, last_B1H[:, 0], state.last_BH[rows])
        state.token_B[rows] = torch.where(counts_B1 > 0, tokens_BM.to(at_B1.device).gather(1, at_B1), state.token_B[rows, None])[:, 0]
        state.level_BWX = None

    def _prefix(self, slots: DraftSlots, f_BMH: Tensor, last_B1H: Tensor, counts_B: Tensor, counts: list[int] | None, rows: slice) -> Tensor:
        """The new pairs into the prefix layer's cache -> its output [B, 1, H] at each row's last one."""
        assert self.prefix_layer is not None
        layer, attention = self.prefix_layer, self.prefix_layer.self_attn
        slots.write(rows, *attention.key_value(layer.inputs(f_BMH), slots.rope(rows, 0, f_BMH.shape[1])), 0)
        slots.advance(rows, counts_B, counts)
        q_BKQD = attention.query(layer.inputs(last_B1H), over_groups(slots.rope(rows, -1)))
        return self.prefix_norm(layer.finish(attention.output(slots.attend(rows, q_BKQD), 1), last_B1H))

    @torch.no_grad()
    def begin(self, state: HydraState, rows: slice, depth: int | None = None) -> Tensor:
        state.level_BWX = torch.cat([state.last_BH[rows], self.embed(state.token_B[rows])], -1)[:, None]
        return self._level(state.level_BWX)[:, 0]

    @torch.no_grad()
    def step(self, state: HydraState, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        assert state.level_BWX is not None, "step before begin"
        above_BWX = state.level_BWX.gather(1, parents_BW[..., None].expand(-1, -1, state.level_BWX.shape[-1]))
        state.level_BWX = torch.cat([above_BWX, self.embed(tokens_BW)], -1)
        return self._level(state.level_BWX)

    def _level(self, level_BWX: Tensor) -> Tensor:
        """The logits [B, W, U] of what follows each node of a level; its depth shows in how much there is to read."""
        i = level_BWX.shape[-1] // (self.config.hidden_size or 1) - 2
        if i >= len(self.hydra_mlp):
            raise ValueError(f"{len(self.hydra_mlp)} Hydra heads draft no level {i + 1}")
        return self.logits(self.hydra_mlp[i](level_BWX), i)
