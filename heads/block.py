"""BlockHead: what the block drafters share (dflash.py, dspark.py), which fill a whole block of masks in one forward.

    features f_s, s ≤ t ─ fc ─ hidden_norm ─► context c_s ── keys and values in every layer, at position s ──┐
    anchor x_{t+1}, MASK, …, MASK ─ target's embedding ─► block of P, positions t+1 … t+P ─► layers ◄────────┘ ─ norm ─► states ─ lm_head

A block's queries read the context of slots s ≤ t of its document, which lie strictly before the anchor, and all of the block, both ways. Context
does not depend on the block: its keys and values are made once per sequence in training, once per pair in drafting, without any attention.
No block reads another. As masks read each other, a block of another length is another function: it is always run whole.

Step j is block position first_step + j: 1 + j where each mask says which token it hides (DFlash), j where each position says what follows (DSpark).
In training only slots that the loss asks for (batch.valid_BTJ at step 0) become anchors, and `thin` draws at most head.anchors of a row.

Positions and masks are those of the original training code (context s < anchor, block position k at the anchor's + k) and of vLLM.

Shape suffixes: B rows, T slots, J steps, N anchors of a row, P block positions, M new pairs, F feature width (taps · H), H hidden (D in base.py),
S state, U draft vocabulary, V target's, K key/value heads, G query heads per key/value head, Q folded queries, D head dimension, W drafted
tokens of one level.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, Unrolled
from draftheads.heads.config import LayerConfig, Tap, mask_token
from draftheads.heads.layered import LayeredHead
from draftheads.heads.layers import Layer, Norm, over_groups
from draftheads.heads.slots import DraftSlots
from draftheads.recipes.schema import MOST_DRAFTED, Geometry, RecipeError


class BlockConfig(LayerConfig):
    """mask_token_id: by default the last id of the vocabulary. Every target has it; in a BPE vocabulary it is the rarest token, or a row that no
    tokenizer uses. The embedding is frozen, so that any id does which texts hardly hold."""

    num_layers: int = Field(5, ge=1)
    num_taps: int = Field(5, ge=1, description="where taps are left out: so many, evenly spaced over the target's layers")
    block_size: int = Field(16, ge=2, le=MOST_DRAFTED, description="anchor and masks")
    anchors: int = Field(512, ge=1, description="blocks trained of a row at a time, drawn anew each time; fewer cost less")
    mask_token_id: int | None = Field(None, ge=0, description="token fed at masked positions; None: the target's last")

    def default_taps(self, geometry: Geometry) -> tuple[Tap, ...]:
        """Outputs of layers 1 … L − 3, evenly spaced and rounded, as in the original (a single one: the middle's); fewer where they would coincide.
        Tap k is the output of layer k − 1."""
        L, n = geometry.num_layers, self.num_taps
        outputs = [1 + i * (max(1, L - 3) - 1) / (n - 1) for i in range(n)] if n > 1 else [L // 2]
        return tuple(sorted({min(round(x) + 1, L - 1) for x in outputs}))

    def resolve(self, geometry: Geometry) -> Self:
        found = super().resolve(geometry)
        return found.model_copy(update={"mask_token_id": mask_token(self.mask_token_id, geometry)})


@dataclass(eq=False)
class BlockState:
    """slots: each layer's keys and values of the context. anchor_B: each row's newest token. Of the draft begun: the logits of all its levels as far
    as they don't depend on what is drafted, and the level last given."""

    slots: DraftSlots
    anchor_B: Tensor
    base_BJU: Tensor | None = None
    level: int = 0


class BlockHead(LayeredHead):
    first_step: ClassVar[int]

    def __init__(self, config: BlockConfig, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__(config, geometry, draft_ids)
        H, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.max_depth = config.block_size - self.first_step
        self.fc = nn.Linear(len(self.taps) * H, H, bias=False)
        self.hidden_norm = Norm(H, eps)
        self.layers = nn.ModuleList(Layer(*self.layer_sizes(), qk_norm=True) for _ in range(config.num_layers))
        self.norm = Norm(H, eps)
        self.finish_init()

    # ---- what a head says of its own

    @abstractmethod
    def state(self, h: Tensor, previous: Tensor) -> Tensor:
        """[..., H] of one step, and the tokens [...] before the label → [..., S], what `logits` reads."""

    @abstractmethod
    def follow(self, base_B1U: Tensor, tokens_BW: Tensor) -> Tensor:
        """Logits of a level's positions → [B, W, U], of what follows each of the W tokens."""

    @property
    def like(self) -> Tensor:
        """A weight: its device and dtype are the head's."""
        return self.norm.weight

    def context(self, features_BTF: Tensor) -> Tensor:
        found: Tensor = self.hidden_norm(self.fc(features_BTF.to(self.like.dtype)))
        return found

    def block(self, anchor: Tensor) -> Tensor:
        """Tokens [...] → [..., P], each with its masks."""
        masks = torch.full_like(anchor, self.config.mask_token_id)[..., None].expand(*anchor.shape, self.config.block_size - 1)
        return torch.cat([anchor[..., None], masks], -1)

    def engine_config(self) -> dict[str, Any]:
        """config.json as vLLM and SGLang read it: target_layer_ids count layer outputs, one less than taps."""
        c, ids = self.config, [t - 1 for t in self.taps if isinstance(t, int)]
        return {
            "architectures": ["DFlashDraftModel"], **self.llama_keys(), "model_type": "qwen3",
            "layer_types": ["full_attention"] * c.num_layers, "use_sliding_window": False,
            "block_size": c.block_size, "num_target_layers": self.geometry.num_layers,
            "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": ids},
        }

    # ---- training

    def check_steps(self, steps: int) -> None:
        if steps != self.max_depth:
            raise RecipeError(f"train.unroll asks for {steps} steps; a block of head.block_size {self.config.block_size} has exactly "
                              f"{self.max_depth}, and another length would be another function: set steps to {self.max_depth}")

    def thin(self, valid_TJ: Tensor, generator: torch.Generator) -> Tensor:
        """At most head.anchors slots of those valid at step 0, each with all its steps."""
        draw_T = torch.rand(len(valid_TJ), generator=generator)
        chosen = torch.where(valid_TJ[:, 0], draw_T, 2.0).argsort(stable=True)[: self.config.anchors]
        kept_T1 = torch.zeros(len(valid_TJ), 1, dtype=torch.bool).index_fill_(0, chosen, True)
        return valid_TJ & kept_T1

    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        """Blocks behind the valid slots, gathered to the row that has the most of them; states are zero at all other slots."""
        self.check_steps(steps)
        (B, T), P = batch.documents_BT.shape, self.config.block_size
        valid_BT = batch.valid_BTJ[..., 0]
        N = max(1, int(valid_BT.sum(1).max())) if B else 1  # the host waits for the device here, once
        slot_BN = valid_BT.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :N]
        real_BN = valid_BT.gather(1, slot_BN)
        tokens_BNJ = batch.tokens_BTJ[..., :steps].gather(1, slot_BN[..., None].expand(-1, -1, steps))

        mask_BNT = context_mask(batch.documents_BT, slot_BN)
        context_BTH, near = self.context(batch.features_BTF), self.cos_sin(batch.positions_BT)
        cos_BQD, sin_BQD = self.cos_sin(block_positions(batch.positions_BT.gather(1, slot_BN), P).flatten(1))
        h_BQH = self.embed(self.block(tokens_BNJ[..., 0]).flatten(1))
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attention, x_BQH = layer.self_attn, layer.inputs(h_BQH)
            far_keys = attention.key_value(context_BTH, (near[0][:, None], near[1][:, None]))
            own_keys = attention.key_value(x_BQH, (cos_BQD[:, None], sin_BQD[:, None]))
            q_BKQD = attention.query(x_BQH, (cos_BQD[:, None, None], sin_BQD[:, None, None]))
            h_BQH = layer.finish(attention.output(attend_blocks(q_BKQD, far_keys, own_keys, mask_BNT), N * P), h_BQH)
        h_BNPH = self.norm(h_BQH).view(B, N, P, -1)

        states = []
        for j in range(steps):
            state_BNS = self.state(h_BNPH[:, :, self.first_step + j], tokens_BNJ[..., j])
            state_BNS = state_BNS.masked_fill(~real_BN[..., None], 0.0)
            empty_BTS = state_BNS.new_zeros(B, T, state_BNS.shape[-1])
            states.append(empty_BTS.scatter(1, slot_BN[..., None].expand_as(state_BNS), state_BNS))
        return Unrolled(states)

    # ---- drafting

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> BlockState:
        c, like = self.config, self.like
        slots = DraftSlots(batch, max_len, max(drafts, c.block_size), c.num_kv_heads, c.head_dim, like, self.cos_sin, layers=c.num_layers)
        with torch.inference_mode(False), torch.no_grad():
            return BlockState(slots, torch.zeros(batch, dtype=torch.int64, device=like.device))

    def clear(self, state: BlockState, row: int) -> None:
        state.slots.clear(row)

    def move(self, state: BlockState, source: int, to: int) -> None:
        state.slots.move(source, to)
        state.anchor_B[to] = state.anchor_B[source]

    @torch.no_grad()
    def extend(self, state: BlockState, features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        """Context keys and values of the new pairs, and each row's newest token: nothing else is remembered."""
        slots = state.slots
        counts = slots.counts(rows, counts_B)
        if counts is not None and not any(counts):
            return
        state.base_BJU = None
        context_BMH, cos_sin = self.context(features_BMF), slots.rope(rows, 0, tokens_BM.shape[1])
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            slots.write(rows, *layer.self_attn.key_value(context_BMH, cos_sin), 0, layer=i)
        slots.advance(rows, counts_B, counts)
        counts_B1 = counts_B.to(tokens_BM.device)[:, None]
        last_B = tokens_BM.gather(1, (counts_B1 - 1).clamp(min=0))[:, 0]
        state.anchor_B[rows] = torch.where(counts_B1[:, 0] > 0, last_B, state.anchor_B[rows])

    @torch.no_grad()
    def begin(self, state: BlockState, rows: slice, depth: int | None = None) -> Tensor:
        """The whole block, whatever the depth; only its last layer may leave out what no level will ask for."""
        assert self.max_depth is not None
        slots, P, J = state.slots, self.config.block_size, min(depth or self.max_depth, self.max_depth)
        cos, sin = slots.rope(rows, 0, P)
        anchor_B = state.anchor_B[rows]
        h_BPH = self.embed(self.block(anchor_B))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            attention, x_BPH = layer.self_attn, layer.inputs(h_BPH)
            slots.write(rows, *attention.key_value(x_BPH, (cos, sin)), 0, layer=i)
            asked = slice(0, P) if i + 1 < len(self.layers) else slice(self.first_step, self.first_step + J)
            x_BPH, h_BPH = x_BPH[:, asked], h_BPH[:, asked]
            q_BKQD = attention.query(x_BPH, over_groups((cos[..., asked, :], sin[..., asked, :])))
            a_BKQD = slots.attend(rows, q_BKQD, P, layer=i)
            h_BPH = layer.finish(attention.output(a_BKQD, x_BPH.shape[1]), h_BPH)
        state.level, state.base_BJU = 0, self.lm_head(self.norm(h_BPH))
        return self._level(state, anchor_B[:, None])[:, 0]

    @torch.no_grad()
    def step(self, state: BlockState, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        state.level += 1
        return self._level(state, tokens_BW)

    def _level(self, state: BlockState, tokens_BW: Tensor) -> Tensor:
        assert state.base_BJU is not None, "step before begin"
        if state.level >= state.base_BJU.shape[1]:
            raise ValueError(f"a block begun for {state.base_BJU.shape[1]} levels has no level {state.level + 1}")
        return self.follow(state.base_BJU[:, state.level, None], tokens_BW)


def block_positions(slot_BN: Tensor, P: int) -> Tensor:
    """[B, N, P]: the pair at position t has its token, the anchor, at t + 1."""
    return slot_BN[..., None] + 1 + torch.arange(P, device=slot_BN.device)


def context_mask(documents_BT: Tensor, slot_BN: Tensor) -> Tensor:
    """Additive float32 [B, N, T]: 0 where the block behind slot t may read the context of slot s ≤ t of its own document, else −inf."""
    same_BNT = documents_BT.gather(1, slot_BN)[..., None] == documents_BT[:, None]
    allowed_BNT = same_BNT & (torch.arange(documents_BT.shape[1], device=slot_BN.device) <= slot_BN[..., None])
    return torch.zeros(allowed_BNT.shape, device=slot_BN.device).masked_fill_(~allowed_BNT, float("-inf"))


def attend_blocks(q_BKQD: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask_BNT: Tensor) -> Tensor:
    """Queries of N blocks (folded, Q = G·N·P) against the context [B, K, T, D] and their own block [B, K, N·P, D]: one float32 softmax over
    T + P columns."""
    (B, K, Q, D), (_, N, T) = q_BKQD.shape, mask_BNT.shape
    own_keys, own_values = (x.view(B, K, 1, N, -1, D) for x in own)
    P = own_keys.shape[4]
    q_BKGNPD = q_BKQD.view(B, K, -1, N, P, D)
    far = (q_BKQD @ context[0].transpose(-1, -2)).float().view(B, K, -1, N, P, T) + mask_BNT[:, None, None, :, None]
    near = (q_BKGNPD @ own_keys.transpose(-1, -2)).float()
    p = torch.softmax(torch.cat([far, near], -1), -1).to(q_BKQD.dtype)
    return p[..., :T].reshape(B, K, Q, T) @ context[1] + (p[..., T:] @ own_values).reshape(B, K, Q, D)
