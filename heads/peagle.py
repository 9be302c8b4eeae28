"""P-EAGLE: EAGLE-3 that drafts all its tokens in one forward, instead of feeding each back.

    depth 0   f_t, x_{t+1} ─────────► EAGLE-3's layer ─► further layers ─ norm ─ lm_head ─► q(x_{t+2})
    depth d   mask_hidden, mask token ─► the same, at RoPE position t + d ────────────────► q(x_{t+2+d})

mask_hidden is learned and stands where the raw taps would: it goes through fc (and its norms). The mask token is an id of the target's frozen
embedding. In every layer the query of slot t at depth d attends to the depth-0 keys of slots s ≤ t of its document and to its own slot's keys of
depths 1 … d. At decoding that is a plain causal mask: committed pairs, then the masked ones behind the last. vLLM's parallel drafting has
the same positions, inputs and mask (its kernel copy_and_expand_eagle_inputs).

What is drafted at a depth does not depend on what was drafted before it: all nodes of a tree's level have the same logits.

P-EAGLE: arXiv 2602.01469. Weights are EAGLE-3's, with layers.{i}.* from i = 1 on (midlayer is vLLM's layers.0) and mask_hidden [1, taps · H].

Shape suffixes: B rows, T slots, J depths, N = J·B, M new pairs, F feature width (taps · H), H hidden, U draft vocabulary, X what attention reads,
K key/value heads, Q folded queries, D head dimension, W tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, Unrolled
from draftheads.heads.config import mask_token
from draftheads.heads.eagle3 import Eagle3, Eagle3Config
from draftheads.heads.feedback import step_positions
from draftheads.heads.layers import Layer, MidLayer, attend_unrolled, causal_mask, over_groups
from draftheads.heads.slots import DraftSlots
from draftheads.recipes.schema import Geometry, RecipeError


class PEagleConfig(Eagle3Config):
    """mask_token_id: by default the last id of the vocabulary. Every target has it; in a BPE vocabulary it is the rarest token, or a row that no
    tokenizer uses; and should it occur in a text, its real features still tell it from a mask."""

    type: Literal["peagle"] = "peagle"  # type: ignore[assignment]
    num_layers: int = Field(4, ge=1, description="EAGLE-3's layer and the standard ones behind it")  # type: ignore[assignment]
    norm_output: Literal[False] = False  # nothing is fed back
    depths: int = Field(8, ge=1, le=64, description="tokens of a draft at most, and unroll steps at most")
    cod_ratio: float = Field(0.8, gt=0, le=1, description="a slot is trained at depth d with probability cod_ratio^d; 1: everywhere")
    mask_token_id: int | None = Field(None, ge=0, description="token fed at depths > 0; None: the target's last")

    def resolve(self, geometry: Geometry) -> PEagleConfig:
        found = super().resolve(geometry)
        assert isinstance(found, PEagleConfig)
        return found.model_copy(update={"mask_token_id": mask_token(self.mask_token_id, geometry)})


@dataclass(eq=False)
class PEagleState:
    """last_BH: what `logits` turns into the first drafted token. Of the draft begun: the logits of all its levels, and the level last given."""

    slots: DraftSlots
    last_BH: Tensor
    drafts_BJU: Tensor | None = None
    level: int = 0


class PEagle(Eagle3):
    Config: ClassVar[type[PEagleConfig]] = PEagleConfig

    def finish_init(self) -> None:
        self.layers = nn.ModuleDict({str(i): Layer(*self.layer_sizes()) for i in range(1, self.config.num_layers)})
        # As large as normed taps are: from zero, the norms before and behind fc would make its first gradients enormous.
        self.mask_hidden = nn.Parameter(torch.randn(1, self.fc.in_features))
        self.max_depth = self.config.depths
        super().finish_init()

    @classmethod
    def build(cls, config: PEagleConfig, geometry: Geometry, draft_ids: Tensor | None) -> PEagle:  # type: ignore[override]
        return cls(config.resolve(geometry), geometry, draft_ids)

    def all_layers(self) -> list[MidLayer | Layer]:
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    def masked(self) -> tuple[Tensor, Tensor]:
        """Embedding and fused state at depths > 0, both [1, 1, H]."""
        token_11 = torch.full((1, 1), self.config.mask_token_id, dtype=torch.long, device=self.mask_hidden.device)
        return self.embed(token_11), self.fuse(self.mask_hidden[None])

    def engine_config(self) -> dict[str, Any]:
        """EAGLE-3's, which vLLM loads by the same architecture with parallel_drafting: true; engines call the mask token by different names."""
        c = self.config
        return {**super().engine_config(), **dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), c.mask_token_id),
                "parallel_drafting": True, "depths": c.depths, "cod_ratio": c.cod_ratio}

    # ---- training

    def check_steps(self, steps: int) -> None:
        if steps > self.config.depths:
            raise RecipeError(f"{steps} unroll steps, head.depths is {self.config.depths}: lower train.unroll or raise head.depths")

    def thin(self, valid_TJ: Tensor, generator: torch.Generator) -> Tensor:
        """One draw a slot, so that depths are nested. Depth d then weighs cod_ratio^d in the loss, besides train.loss_decay."""
        draw_T1 = torch.rand(len(valid_TJ), 1, generator=generator)
        return valid_TJ & (draw_T1 < self.config.cod_ratio ** torch.arange(valid_TJ.shape[1]))

    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        """Layer by layer, all depths at once: they are rows of one large batch, [J·B, T]."""
        J, (B, T) = steps, batch.documents_BT.shape
        cos_NTD, sin_NTD = self.cos_sin(step_positions(batch.positions_BT, J).flatten(0, 1))
        mask_BTT = causal_mask(batch.documents_BT)
        mask_e, mask_g = (x.expand((J - 1) * B, T, -1) for x in self.masked())
        e_NTH = torch.cat([self.embed(batch.tokens_BTJ[..., 0]), mask_e])
        h_NTH = torch.cat([self.fuse(batch.features_BTF), mask_g])
        for layer in self.all_layers():
            (x_NTX, r_NTH), attention = read(layer, e_NTH, h_NTH), layer.self_attn
            keys, values = (y.chunk(J) for y in attention.key_value(x_NTX, (cos_NTD[:, None], sin_NTD[:, None])))
            queries = attention.query(x_NTX, (cos_NTD[:, None, None], sin_NTD[:, None, None])).chunk(J)
            a_NKQD = torch.cat([attend_unrolled(queries[j], list(keys[: j + 1]), list(values[: j + 1]), mask_BTT) for j in range(J)])
            h_NTH = layer.finish(attention.output(a_NKQD, T), r_NTH)
        return Unrolled(list(self.norm(h_NTH).chunk(J)))

    # ---- drafting

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> Any:
        c, like = self.config, self.like
        slots = DraftSlots(batch, max_len, drafts, c.num_kv_heads, c.head_dim, like, self.cos_sin, layers=c.num_layers)
        with torch.inference_mode(False), torch.no_grad():
            return PEagleState(slots, torch.zeros(batch, c.hidden_size, device=like.device, dtype=like.dtype))

    def move(self, state: Any, source: int, to: int) -> None:
        state.slots.move(source, to)
        state.last_BH[to] = state.last_BH[source]

    @torch.no_grad()
    def extend(self, state: Any, features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        """All new pairs through all layers, as later pairs read their keys in each; the last layer's attention and MLP only for each row's last."""
        slots: DraftSlots = state.slots
        counts = slots.counts(rows, counts_B)
        if counts is not None and not any(counts):
            return
        state.drafts_BJU = None
        e_BMH, h_BMH = self.embed(tokens_BM), self.fuse(features_BMF)
        h_BMH = self._causal(slots, rows, e_BMH, h_BMH, self.config.num_layers - 1)
        last, at = self.all_layers()[-1], self.config.num_layers - 1
        x_BMX, r_BMH = read(last, e_BMH, h_BMH)
        slots.write(rows, *last.self_attn.key_value(x_BMX, slots.rope(rows, 0, x_BMX.shape[1])), 0, layer=at)
        slots.advance(rows, counts_B, counts)
        last_B11 = (counts_B.to(r_BMH.device) - 1).clamp(min=0)[:, None, None]
        x_B1X, r_B1H = (y.gather(1, last_B11.expand(-1, 1, y.shape[-1])) for y in (x_BMX, r_BMH))
        a_BKQD = slots.attend(rows, last.self_attn.query(x_B1X, over_groups(slots.rope(rows, -1))), layer=at)
        last_BH = self.norm(last.finish(last.self_attn.output(a_BKQD, 1), r_B1H))[:, 0]
        if counts is None or min(counts) == 0:  # a row without news keeps its state
            last_BH = torch.where((counts_B > 0).to(last_BH.device)[:, None], last_BH, state.last_BH[rows])
        state.last_BH[rows] = last_BH

    @torch.no_grad()
    def begin(self, state: Any, rows: slice, depth: int | None = None) -> Tensor:
        """The whole draft: masked tokens behind the committed pairs, and one product with lm_head for all levels."""
        slots: DraftSlots = state.slots
        states_BJH = state.last_BH[rows][:, None]
        # No more levels than their tokens have room in the cache: the last level's are never stepped.
        W = min(self.config.depths if depth is None else depth, self.config.depths, slots.drafts + 1) - 1
        if W > 0:
            e_BWH, g_BWH = (x.expand(len(states_BJH), W, -1) for x in self.masked())
            h_BWH = self._causal(slots, rows, e_BWH, g_BWH, self.config.num_layers)
            states_BJH = torch.cat([states_BJH, self.norm(h_BWH)], 1)
        state.drafts_BJU, state.level = self.logits(states_BJH), 0
        return state.drafts_BJU[:, 0]

    @torch.no_grad()
    def step(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        assert state.drafts_BJU is not None, "step before begin"
        state.level += 1
        if state.level >= state.drafts_BJU.shape[1]:
            raise ValueError(f"level {state.level + 1} of a draft begun with {state.drafts_BJU.shape[1]} levels")
        return state.drafts_BJU[:, state.level, None].expand(-1, tokens_BW.shape[1], -1)

    def _causal(self, slots: DraftSlots, rows: slice, e_BWH: Tensor, h_BWH: Tensor, count: int) -> Tensor:
        """The first `count` layers for W tokens at the positions behind the committed pairs, each of which reads those and, of the W, itself and
        the ones before; their keys are left in the cache."""
        B, W, _ = h_BWH.shape
        cos_sin = slots.rope(rows, 0, W)
        before_BWW = torch.ones(W, W, dtype=torch.bool, device=h_BWH.device).tril().expand(B, W, W)
        for at, layer in enumerate(self.all_layers()[:count]):
            (x_BWX, r_BWH), attention = read(layer, e_BWH, h_BWH), layer.self_attn
            slots.write(rows, *attention.key_value(x_BWX, cos_sin), 0, layer=at)
            a_BKQD = slots.attend(rows, attention.query(x_BWX, over_groups(cos_sin)), W, before_BWW, layer=at)
            h_BWH = layer.finish(attention.output(a_BKQD, W), r_BWH)
        return h_BWH


def read(layer: MidLayer | Layer, e_BTH: Tensor, h_BTH: Tensor) -> tuple[Tensor, Tensor]:
    """→ (what a layer's attention reads: the first one the embedding as well; what its output is added to)"""
    return layer.inputs(e_BTH, h_BTH) if isinstance(layer, MidLayer) else (layer.inputs(h_BTH), h_BTH)
