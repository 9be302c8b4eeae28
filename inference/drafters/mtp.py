"""The target's own multi-token-prediction layers as a Drafter (DeepSeek-V3 §2.2, arXiv 2412.19437), where transformers has them (MtpModel).

pairs (final state at p − 1, token at p) ─► layer 0 ─► logits of token p + 1; (layer 0's state at p − 1, token at p) ─► layer 1 ─► …

Layer j's state at the token of position p is E_j[p] = layer_j(E_{j−1}[p − 1], x_p), E_{−1} being the target's final (post-norm) state; it attends to
E_j[q], q ≤ p, and predicts x_{p+1}. So the first draft comes from layer 0 at the root, and the one below a drafted token of depth d from layer d at
that token, for which layer d must have seen the token's ancestors too. That is what transformers computes, and it stops after K tokens, one a layer;
vLLM takes layer d mod K. We go on with the last layer, fed with its own state: for K = 1 (DeepSeek-V3, GLM-4.5) that is what vLLM does.

MtpModel gives weights and layer code; slots, masks and trees are ours. K layers share one SlotCache; slot = pair = position of the token − 1.

Shape suffixes: B rows, M new pairs (padded), D hidden, W nodes of a level, A drafted tokens so far, T tokens of one layer call, X some
more states, S slots.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from draftheads.heads.slots import descend
from draftheads.inference import attention
from draftheads.inference.cache import SlotCache
from draftheads.inference.drafters.pairs import PairDrafter
from draftheads.inference.gguf import one_line
from draftheads.inference.graphs import Graphs
from draftheads.inference.packed import pack_linears
from draftheads.inference.target import Target
from draftheads.inference.vocabulary import shared_vocabulary
from draftheads.recipes.schema import RecipeError

INSTEAD = "draft with a trained head, a smaller model or n-grams instead"


class MtpDrafter(PairDrafter):
    """layers: transformers' MtpModel of this very target; None reads it from the target's checkpoint. min_confidence: as for a head.

    RecipeError: a target without such layers, a checkpoint without their weights, a transformers before 5.20.
    """

    name = "mtp"
    taps = ("final",)

    def __init__(self, target: Target, layers: Any = None, *, min_confidence: float = 0.0) -> None:
        mtp = MtpLayers(load_layers(target) if layers is None else layers, target)
        super().__init__(mtp, shared_vocabulary(target, target), target.geometry.max_positions, min_confidence)

    def lend(self, graphs: Graphs | None) -> None:
        """Not captured: transformers' layers are called with the host's lengths."""
        self.graphs = None


class MtpState:
    """cache: committed pairs and, behind them, drafted tokens level by level. last: per layer its state [batch, D] at the newest pair.

    The draft in the making: drafted tokens_BA at positions_BA; parents_BA: 0 for the root, 1 + index of a drafted token; above_BTA: what the newest
    of them may read of it (None while a mask can be done without); known: the last called layer's states [B, 1 + A, D] at the root and at them.
    """

    tokens_BA: Tensor
    positions_BA: Tensor
    parents_BA: Tensor
    known: Tensor
    above_BTA: Tensor | None
    widths: list[int]

    def __init__(self, cache: SlotCache, last: list[Tensor]) -> None:
        self.cache, self.last = cache, last


class MtpLayers:
    """The layers as PairDrafter wants a head: new_state, clear, move, extend, begin, step (see heads/base.py for what each does).

    mtp: transformers' MtpModel; its layers are packed if the target's are."""

    def __init__(self, mtp: Any, target: Target) -> None:
        self.mtp, self.target, self.K = mtp.eval(), target, len(mtp.layers)
        self.kinds = getattr(mtp.config, "layer_types", None) or ["full_attention"] * self.K
        self.windows = [getattr(mtp.config, "sliding_window", None) if kind == "sliding_attention" else None for kind in self.kinds]
        if target.packed:
            pack_linears(mtp.layers)

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> MtpState:
        like = self.target.embed_VD
        return MtpState(SlotCache(batch, max_len + drafts, like.device), [like.new_zeros(batch, like.shape[1]) for _ in range(self.K)])

    def clear(self, state: MtpState, row: int) -> None:
        state.cache.clear(row)
        for last_BD in state.last:
            last_BD[row] = 0

    def move(self, state: MtpState, source: int, to: int) -> None:
        state.cache.move(source, to)
        for last_BD in state.last:
            last_BD[to] = last_BD[source]

    @torch.inference_mode()
    def extend(self, state: MtpState, features_BMD: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        cache, M, counts = state.cache, tokens_BM.shape[1], counts_B.tolist()
        starts, length_B = cache.lengths[rows], cache.lengths_B[rows]
        new_BM = length_B[:, None] + torch.arange(M, device=cache.device)
        # A row without news keeps its state: it takes it from column 0 of what follows, which is the state before the first new pair.
        newest_B = torch.tensor(counts, device=cache.device)
        before_BMD = features_BMD
        for j in range(self.K):
            mask_BMS = None
            if j > 0 or not self._plain(j, starts, M):
                mask_BMS = attention.block_mask(length_B, cache.view(max(starts) + M), None, M)
            if mask_BMS is not None and j > 0:
                # Layer j begins at the token of position j + 1: slots before j hold nothing. (Each token still sees itself: no row may be empty.)
                slot_S = torch.arange(mask_BMS.shape[2], device=cache.device)
                mask_BMS = mask_BMS & ((slot_S >= j) | (slot_S == new_BM[..., None]))
            found_BMD = self._layer(j, before_BMD, tokens_BM, new_BM + 1, mask_BMS, cache, rows, starts)
            states_BXD = torch.cat([state.last[j][rows, None], found_BMD], 1)
            state.last[j][rows] = states_BXD[torch.arange(len(counts), device=cache.device), newest_B]
            before_BMD = states_BXD[:, :-1]
        cache.advance(rows, counts)

    @torch.inference_mode()
    def begin(self, state: MtpState, rows: slice, depth: int | None = None) -> Tensor:
        length_B = state.cache.lengths_B[rows]
        state.tokens_BA = state.positions_BA = state.parents_BA = length_B.new_zeros(len(length_B), 0)
        state.known, state.above_BTA, state.widths = state.last[0][rows, None], None, []
        return self.target.logits(state.last[0][rows])

    @torch.inference_mode()
    def step(self, state: MtpState, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        cache, W, depth, drafted = state.cache, tokens_BW.shape[1], len(state.widths) + 1, sum(state.widths)
        length_B = cache.lengths_B[rows]
        j = min(depth, self.K - 1)
        if not (self.K == 1 and W == 1 and state.above_BTA is None):
            level_BWA = descend(None if state.above_BTA is None else state.above_BTA[:, -state.widths[-1] :], parents_BW, drafted)
            state.above_BTA = level_BWA if state.above_BTA is None else torch.cat([F.pad(state.above_BTA, (0, W)), level_BWA], 1)
        state.tokens_BA = torch.cat([state.tokens_BA, tokens_BW], 1)
        state.positions_BA = torch.cat([state.positions_BA, (length_B[:, None] + depth).expand(-1, W)], 1)
        state.parents_BA = torch.cat([state.parents_BA, parents_BW + (1 + drafted - state.widths[-1] if depth > 1 else 0)], 1)
        state.widths.append(W)
        # A layer that is called for the first time in this draft must see all of it; the last layer has seen what came before this level.
        T = drafted + W if depth < self.K else W
        starts = [n + drafted + W - T for n in cache.lengths[rows]]
        mask_BTS = None
        if state.above_BTA is not None or not self._plain(j, starts, T):
            view = cache.view(max(starts) + T)
            above_BTA = None if state.above_BTA is None else state.above_BTA[:, -T:]
            if above_BTA is not None and min(cache.lengths[rows]) < j:  # a prompt so short that the first drafts are not layer j's yet
                own_TA = torch.eye(drafted + W, dtype=torch.bool, device=cache.device)[-T:]
                above_BTA = above_BTA & ((state.positions_BA > j)[:, None] | own_TA)
            mask_BTS = attention.level_mask(length_B, view, above_BTA, drafted + W)
            slot_S = torch.arange(view, device=cache.device)
            mask_BTS = mask_BTS & ((slot_S >= j) | (slot_S >= length_B[:, None]))[:, None]
        parents_BT1 = state.parents_BA[:, -T:, None]
        before_BTD = state.known.gather(1, parents_BT1.expand(-1, -1, state.known.shape[-1]))
        found_BTD = self._layer(j, before_BTD, state.tokens_BA[:, -T:], state.positions_BA[:, -T:], mask_BTS, cache, rows, starts)
        state.known = torch.cat([state.known if depth >= self.K else state.last[j][rows, None], found_BTD], 1)
        return self.target.logits(found_BTD[:, -W:])

    def _plain(self, j: int, starts: list[int], T: int) -> bool:
        """Whether layer j needs no mask for T new tokens that see everything before them (see Target.forward)."""
        return self.target.unmasked(starts, T, self.windows[j])

    def _layer(self, j: int, before_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask_BTS: Tensor | None, cache: SlotCache, rows: slice,
               starts: list[int]) -> Tensor:
        """E_j [B, T, D] of T tokens a row, written to slots starts[b] …"""
        target, T = self.target, tokens_BT.shape[1]
        cache.prepare(rows, starts, T, starts[0] + T if mask_BTS is None else mask_BTS.shape[2])
        mask = None
        if mask_BTS is not None:
            mask = target.shaped_mask(mask_BTS, positions_BT - 1, torch.tensor(starts, device=cache.device), self.windows[j])
        # transformers would make a mask of its own here, which knows neither trees nor rows. Its method is back afterwards.
        self.mtp.create_masks_for_mtp_layer = lambda *args, **named: {"attention_mask": mask}
        try:
            with attention.use_attention(self.mtp.config, target.attention):
                return self.mtp.forward_layer(j, before_BTD, positions_BT, cache, input_ids=tokens_BT)
        finally:
            del self.mtp.create_masks_for_mtp_layer


def load_layers(target: Target) -> Any:
    """MtpModel with the weights of the target's checkpoint. RecipeError where there are none."""
    count = getattr(target.config, "num_mtp_layers", None)
    if not count:
        raise RecipeError(f"{target.name} has no multi-token-prediction layers (config.num_mtp_layers is {count}); {INSTEAD}")
    try:
        from transformers.modeling_layers import MtpModel

        if not hasattr(MtpModel, "forward_layer"):
            raise ImportError
    except ImportError:
        raise RecipeError(f"drafting with MTP layers needs transformers 5.20 or later, found {transformers.__version__}; {INSTEAD}") from None
    config = target.model.config
    source = config.name_or_path
    try:
        if target.revision is not None and not Path(source).is_dir():
            from huggingface_hub import snapshot_download

            # MtpModel reads the newest revision; the target may be another.
            config.name_or_path = snapshot_download(source, revision=target.revision, allow_patterns=["*.json", "*.safetensors"])
        return MtpModel.from_pretrained(target.model, device_map={"": target.device})
    except Exception as error:  # missing files, missing weights, an ambiguous config: no common base
        raise RecipeError(f"{target.name} names {count} multi-token-prediction layers, which cannot be loaded from {source or 'memory'} "
                          f"({one_line(error)}); {INSTEAD}") from error
    finally:
        config.name_or_path = source
