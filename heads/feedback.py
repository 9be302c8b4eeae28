"""FeedbackHead: what heads share whose one decoder layer feeds on its own output (eagle.py, eagle3.py): the unrolled loop, and drafting.

    features f_t ─ fuse ──► g ─┐
    token x_{t+1} ─ embed ► e ─┴ inputs ─► x: what attention reads, r: what its output is added to ─► layer ─► out ─ outputs ─► the next step's g,
                                                                                                        and the state that `logits` reads: q(x_{t+2})

Slot t holds the pair (f_t, x_{t+1}) at RoPE position t. Unroll step j feeds x_{t+1+j} at slot t and position t+j; its query attends to the
step-0 keys of slots s ≤ t of its document (real features: what decoding has after a verify) and to the keys of its own slot from
steps 1 … j (what decoding drafted since). Training and drafting use the same layer functions.

Shape suffixes: B rows, T slots, J unroll steps, M new pairs, F feature width (taps · H), H hidden (D in base.py), U draft vocabulary, V target's,
X what attention reads, K key/value heads, Q folded queries, D head dimension, W drafted tokens of one level, A drafted tokens so far.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.heads.base import DraftBatch, Unrolled
from draftheads.heads.layered import LayeredHead
from draftheads.heads.layers import (
    Layer,
    MidLayer,
    attend_unrolled,
    causal_mask,
    over_groups,
)
from draftheads.heads.slots import DraftSlots, descend


@dataclass(eq=False)
class FeedbackState:
    """The drafting cache, and what the next draft step starts from.

    fed_BH: the state that the last committed pair feeds to the first draft step; last_BH: what `logits` turns into its draft.
    Of the draft so far: its last level's states level_BWH, which drafted slots each of them may read (itself included) above_BWA (None while
    the draft is a chain), and how many levels and tokens it has.
    """

    slots: DraftSlots
    fed_BH: Tensor
    last_BH: Tensor
    level_BWH: Tensor | None = None
    above_BWA: Tensor | None = None
    depth: int = 0
    drafted: int = 0


class FeedbackHead(LayeredHead):
    """A subclass makes its layers in __init__ and ends it with `finish_init`; `layer`, `fuse`, `inputs` and `outputs` say what it is."""

    # ---- what a head is made of

    @property
    @abstractmethod
    def layer(self) -> Layer | MidLayer:
        """The decoder layer."""

    @abstractmethod
    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Tapped features → g [B, T, H] of the first step."""

    @abstractmethod
    def inputs(self, e_BTH: Tensor, g_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding of the token fed, and the state fed → (what attention reads, what its output is added to)."""

    @abstractmethod
    def outputs(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """→ (what is fed back, what `logits` reads)."""

    @property
    def like(self) -> Tensor:
        """A weight: its device and dtype are the head's."""
        return self.layer.post_attention_layernorm.weight

    # ---- training

    def unroll_at(self, batch: DraftBatch, positions_JBT: Tensor) -> Unrolled:
        """`unroll`, with the RoPE position of each slot at each step (see step_positions)."""
        layer, attention = self.layer, self.layer.self_attn
        J, B, T = positions_JBT.shape
        cos_JBTD, sin_JBTD = self.cos_sin(positions_JBT.flatten(0, 1))
        cos_JBTD, sin_JBTD = cos_JBTD.view(J, B, T, -1), sin_JBTD.view(J, B, T, -1)
        mask_BTT = causal_mask(batch.documents_BT)
        g_BTH = self.fuse(batch.features_BTF)
        states: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for j in range(J):
            x_BTX, r_BTH = self.inputs(self.embed(batch.tokens_BTJ[..., j]), g_BTH)
            k_BKTD, v_BKTD = attention.key_value(x_BTX, (cos_JBTD[j, :, None], sin_JBTD[j, :, None]))
            keys.append(k_BKTD)
            values.append(v_BKTD)
            q_BKQD = attention.query(x_BTX, (cos_JBTD[j, :, None, None], sin_JBTD[j, :, None, None]))
            out_BTH = layer.finish(attention.output(attend_unrolled(q_BKQD, keys, values, mask_BTT), T), r_BTH)
            g_BTH, state_BTH = self.outputs(out_BTH)
            states.append(state_BTH)
        return Unrolled(states)

    # ---- drafting

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> FeedbackState:
        c, like = self.config, self.like
        slots = DraftSlots(batch, max_len, drafts, c.num_kv_heads, c.head_dim, like, self.cos_sin)
        with torch.inference_mode(False), torch.no_grad():
            last = torch.zeros(2, batch, c.hidden_size, device=like.device, dtype=like.dtype)
        return FeedbackState(slots, last[0], last[1])

    def clear(self, state: FeedbackState, row: int) -> None:
        state.slots.clear(row)

    def move(self, state: FeedbackState, source: int, to: int) -> None:
        state.slots.move(source, to)
        for kept_BH in (state.fed_BH, state.last_BH):
            kept_BH[to] = kept_BH[source]

    @torch.no_grad()
    def extend(self, state: FeedbackState, features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        """Keys and values of all new pairs; attention and MLP only for each row's last one, whose output drafting starts from."""
        slots = state.slots
        counts = slots.counts(rows, counts_B)
        if counts is not None and not any(counts):
            return
        state.level_BWH, state.above_BWA, state.depth, state.drafted = None, None, 0, 0
        M = tokens_BM.shape[1]
        x_BMX, r_BMH = self.inputs(self.embed(tokens_BM), self.fuse(features_BMF))
        slots.write(rows, *self.layer.self_attn.key_value(x_BMX, slots.rope(rows, 0, M)), 0)
        slots.advance(rows, counts_B, counts)
        if counts is not None and len(counts) == 1:
            x_B1X, r_B1H = x_BMX[:, counts[0] - 1 : counts[0]], r_BMH[:, counts[0] - 1 : counts[0]]
        else:
            last_B11 = (counts_B.to(r_BMH.device) - 1).clamp(min=0)[:, None, None]
            x_B1X, r_B1H = (t.gather(1, last_B11.expand(-1, 1, t.shape[-1])) for t in (x_BMX, r_BMH))
        fed_B1H, last_B1H = self._attend(state, x_B1X, r_B1H, slots.rope(rows, -1), rows)
        fed_BH, last_BH = fed_B1H[:, 0], last_B1H[:, 0]
        if counts is None or min(counts) == 0:  # a row without news keeps its state
            news_B1 = (counts_B > 0).to(fed_BH.device)[:, None]
            fed_BH = torch.where(news_B1, fed_BH, state.fed_BH[rows])
            last_BH = torch.where(news_B1, last_BH, state.last_BH[rows])
        state.fed_BH[rows] = fed_BH
        state.last_BH[rows] = last_BH

    @torch.no_grad()
    def begin(self, state: FeedbackState, rows: slice, depth: int | None = None) -> Tensor:
        state.level_BWH, state.above_BWA, state.depth, state.drafted = state.fed_BH[rows][:, None], None, 0, 0
        return self.logits(state.last_BH[rows])

    @torch.no_grad()
    def step(self, state: FeedbackState, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        slots, W = state.slots, tokens_BW.shape[1]
        assert state.level_BWH is not None, "step before begin"
        if state.drafted + W > slots.drafts:
            raise ValueError(f"{state.drafted + W} drafted tokens in a drafting cache made for {slots.drafts}")
        chain = W == 1 and state.above_BWA is None
        g_BWH = state.level_BWH if chain else state.level_BWH.gather(1, parents_BW[..., None].expand(-1, -1, state.level_BWH.shape[-1]))
        if not chain:
            state.above_BWA = descend(state.above_BWA, parents_BW, state.drafted)
        x_BWX, r_BWH = self.inputs(self.embed(tokens_BW), g_BWH)
        cos_sin = slots.rope(rows, state.depth)
        slots.write(rows, *self.layer.self_attn.key_value(x_BWX, cos_sin), state.drafted)
        state.depth, state.drafted = state.depth + 1, state.drafted + W
        state.level_BWH, last_BWH = self._attend(state, x_BWX, r_BWH, cos_sin, rows)
        return self.logits(last_BWH)

    def _attend(self, state: FeedbackState, x_BWX: Tensor, r_BWH: Tensor, cos_sin: tuple[Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
        """The layer's output for W tokens whose keys are written already, all at one position → (fed back, read by logits), [B, W, H]."""
        attention = self.layer.self_attn
        q_BKQD = attention.query(x_BWX, over_groups(cos_sin))
        a_BKQD = state.slots.attend(rows, q_BKQD, state.drafted, state.above_BWA)
        return self.outputs(self.layer.finish(attention.output(a_BKQD, x_BWX.shape[1]), r_BWH))


def step_positions(positions_BT: Tensor, steps: int) -> Tensor:
    """RoPE positions [J, B, T]: slot t at step j holds the token of position t + j + 1, whose pair is at t + j."""
    return positions_BT + torch.arange(steps, device=positions_BT.device)[:, None, None]
