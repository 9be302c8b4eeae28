"""A smaller causal LM with the target's vocabulary as a Drafter: chains and every tree, for rows of unequal length (arXiv 2211.17192).

start ─► the prompt into the draft's own SlotCache      observe ─► pending tokens, on the host
propose: pending tokens, one forward ─► logits behind the root ─► growth.grow: one forward per further level ─► DraftTree

Drafted tokens are never committed: those that were accepted come back through `observe` and are fed again, together with the bonus token. That
forward is needed for the bonus token anyway, so it costs no further one; and as nothing of a tree is kept, nothing must be compacted.

Shape suffixes: B rows, M pending tokens (padded), T prompt length, W nodes of a level, A drafted tokens so far, S slots, D hidden, U draft
vocabulary.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.slots import descend
from draftheads.heads.tree import DraftTree
from draftheads.inference.attention import level_mask
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.graphs import kind
from draftheads.inference.growth import grow, limited, sprout
from draftheads.inference.noise import Noise
from draftheads.inference.packed import PackedLinear, PackedSlice
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.inference.shapes import MOST_NODES
from draftheads.inference.target import Target
from draftheads.inference.vocabulary import shared_vocabulary
from draftheads.recipes.schema import RecipeError

# With more pending tokens than this a row of a batch is fed alone: the others would be padded to its width.
BURST = 16


@dataclass
class _Row:
    """root: the last token. known: how many tokens the row has, the root included. pending: those of them that are not in the cache yet."""

    root: int = 0
    known: int = 0
    pending: list[int] = field(default_factory=list)


class DraftModelDrafter(Drafter):
    """draft: a Target like any other (Target.load, Target.from_model); it may live on another device and in another dtype: token ids go there,
    logits come back. The target may be its own draft.

    min_confidence: greedy rows of a chain stop where the running product of the draft's top probabilities falls below it (0: never).

    A token id must mean the same to both tokenizers, or this is a RecipeError. Ids that only one of them knows, and lm_head rows beyond the
    tokenizer, are never proposed. Without a tokenizer on either side the ids are taken on trust.

    Beyond the draft's own max_positions a row drafts nothing more (one warning); the output is the target's in any case.
    """

    name = "draft_model"

    def __init__(self, draft: Target, target: Target, *, min_confidence: float = 0.0) -> None:
        self.draft, self.device = draft, target.device
        self.vocab = shared_vocabulary(draft, target)
        self.min_confidence = min_confidence
        self.max_positions = draft.geometry.max_positions
        # The target may write an id that the draft has no embedding for; it is then fed another one, which only costs a bad draft.
        self.last_id = len(draft.embed_VD) - 1 if len(draft.embed_VD) < target.geometry.vocab_size else None
        self.warned = False

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        room = min(max_len, self.max_positions) + MOST_NODES
        if self.graphs is None:
            self.cache = self.draft.new_cache(batch, room)
        else:  # graphs hold the addresses of its buffers
            self.cache = self.graphs.keep(self, (batch, room), lambda: self.draft.new_cache(batch, room))
            for row in range(batch):
                self.cache.clear(row)
        self.rows = [_Row() for _ in range(batch)]

    # ---- what was seen

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        self.cache.clear(row)
        self.rows[row] = _Row(root, len(prompt_T) + 1, [root])
        if not self._off(self.rows[row]):
            self._feed_alone(row, prompt_T)

    def move(self, source: int, to: int) -> None:
        self.cache.move(source, to)
        self.rows[to], self.rows[source] = self.rows[source], _Row()

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        for row, tokens, count in zip(self.rows, tokens_BM.tolist(), counts_B.tolist(), strict=False):
            row.pending += tokens[:count]
            row.root, row.known = tokens[count - 1], row.known + count

    def _off(self, row: _Row) -> bool:
        if row.known <= self.max_positions:
            return False
        if not self.warned:
            warnings.warn(f"{self.draft.name} drafts up to its position {self.max_positions} only; the target goes on without drafts", stacklevel=4)
            self.warned = True
        row.pending.clear()
        return True

    # ---- what is proposed

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        B = len(noise.seeds_B)
        # The last token of a draft is not fed: a draft of depth n ends at position known + n − 2 of the draft model.
        caps = [0 if self._off(row) else min(plan.depth, self.max_positions - row.known + 1) for row in self.rows[:B]]
        if plan.room_B is not None:
            caps = [min(cap, room) for cap, room in zip(caps, plan.room_B, strict=True)]
        rows = sampling if isinstance(sampling, RowSampling) else RowSampling.of([None] * B, sampling, self.device)
        if max(caps) > 0 and self._capturable(B, plan):
            return limited(self._captured(replace(plan, room_B=None), rows, noise.seeds_B), caps, plan.depth, self.name)
        root_B = torch.tensor([row.root for row in self.rows[:B]], device=self.device)
        roots_B = torch.tensor([row.known - 1 for row in self.rows[:B]], device=self.device)
        return grow(_ModelStepper(self, B), root_B, plan, caps, rows, noise, roots_B, self.vocab, self.name, self.min_confidence)

    def feed(self, B: int) -> Tensor:
        """The pending tokens of the first B rows into the cache. -> the draft's state [B, D] at each row's root (garbage where the row is off)."""
        for b, row in enumerate(self.rows[:B]):
            if B > 1 and len(row.pending) > BURST:
                self._feed_alone(b, torch.tensor(row.pending[:-1]))
        ids_BM, counts = self._pending(B)
        final_BMD, _ = self.draft.extend(self.cache, slice(0, B), self.ids(ids_BM))
        self.cache.advance(slice(0, B), counts)
        if min(counts) == max(counts):
            return final_BMD[:, counts[0] - 1]
        last_B = torch.tensor([max(0, count - 1) for count in counts], device=final_BMD.device)
        return final_BMD[torch.arange(B, device=final_BMD.device), last_B]

    def _pending(self, B: int, M: int = 0) -> tuple[Tensor, list[int]]:
        """What is pending, and no longer is: ids [B, M at least], right-padded, and how many of them count."""
        counts = [len(row.pending) for row in self.rows[:B]]
        M = max(M, *counts)
        ids_BM = torch.tensor([row.pending + [0] * (M - len(row.pending)) for row in self.rows[:B]])
        for row in self.rows[:B]:
            row.pending = []
        return ids_BM, counts

    def _feed_alone(self, b: int, ids_M: Tensor) -> None:
        """ids_M, all that row b has before its root. The root itself is fed with the other rows' tokens."""
        row = slice(b, b + 1)
        self.draft.extend(self.cache, row, self.ids(ids_M[None]))
        self.cache.advance(row, [len(ids_M)])
        self.rows[b].pending = [self.rows[b].root]

    def ids(self, tokens: Tensor) -> Tensor:
        """Target ids as the draft is fed them."""
        tokens = tokens.to(self.draft.device)
        return tokens if self.last_id is None else tokens.clamp(max=self.last_id)

    def logits(self, final: Tensor) -> Tensor:
        """[..., D] → [..., U], on the target's device."""
        return self.draft.logits(final)[..., : len(self.vocab.ids_U)].to(self.device)

    # ---- the same as one captured step (see inference/graphs.py)

    def _capturable(self, B: int, plan: Plan) -> bool:
        return (self.graphs is not None and self.min_confidence == 0 and self.draft.device == self.device
                and all(0 < len(row.pending) <= plan.depth + 1 for row in self.rows[:B]))

    def _captured(self, plan: Plan, rows: RowSampling, seeds_B: Tensor) -> DraftTree:
        """`feed` and the draft behind it."""
        assert self.graphs is not None
        B, M = len(seeds_B), plan.depth + 1  # one width, whatever was accepted
        ids_BM, counts = self._pending(B, M)
        slots, cache = slice(0, B), self.cache
        view = self.graphs.view(max(cache.lengths[slots]) + M + MOST_NODES, cache.max_len)

        def draft(ids_BM: Tensor, counts_B: Tensor, seeds_B: Tensor, temperature_B: Tensor) -> DraftTree:
            final_BMD, _ = self.draft.extend(cache, slots, self.ids(ids_BM), view=view)
            cache.lengths_B[slots] += counts_B
            last_B1 = counts_B[:, None] - 1
            first_BD = final_BMD.gather(1, last_B1[..., None].expand(-1, -1, final_BMD.shape[-1]))[:, 0]
            roots_B = cache.lengths_B[slots] - 1
            return sprout(_ModelStepper(self, B, view, first_BD), ids_BM.gather(1, last_B1)[:, 0], plan, plan.depth,
                          replace(rows, temperature_B=temperature_B), Noise(seeds_B, roots_B), roots_B, self.vocab)

        inputs = (ids_BM.to(self.device), torch.tensor(counts, device=self.device), seeds_B, rows.temperature_B)
        tree = self.graphs.run_draft(cache, (plan, B, view, kind(rows)), draft, inputs)
        cache.note(slots, counts)
        return tree


class _ModelStepper:
    """One draft behind the committed slots of the first B rows: its tokens lie there level by level, whatever their depth.

    view: read that many slots and go by the device's lengths alone, first_BD being the state at the roots. None: the host's lengths.
    """

    def __init__(self, drafter: DraftModelDrafter, B: int, view: int | None = None, first_BD: Tensor | None = None) -> None:
        self.drafter, self.rows, self.view, self.first_BD = drafter, slice(0, B), view, first_BD
        self.above_BWA: Tensor | None = None  # which drafted tokens the last level may read; None while it is a chain
        self.depth = self.drafted = 0

    def begin(self, depth: int) -> Tensor:
        return self.drafter.logits(self.drafter.feed(self.rows.stop) if self.first_BD is None else self.first_BD)

    def step(self, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        draft, cache, W = self.drafter.draft, self.drafter.cache, tokens_BW.shape[1]
        chain = W == 1 and self.above_BWA is None
        if not chain:
            self.above_BWA = descend(self.above_BWA, parents_BW.to(draft.device), self.drafted)
        length_B, lengths = cache.lengths_B[self.rows], cache.lengths[self.rows]
        positions_BW = (length_B[:, None] + self.depth).expand(-1, W)
        starts = [n + self.drafted for n in lengths] if self.view is None else length_B + self.drafted
        self.depth, self.drafted = self.depth + 1, self.drafted + W
        mask_BWS = None
        if self.view is not None or not chain or not draft.unmasked([n + self.drafted - 1 for n in lengths], 1, draft.window):
            # Target.forward takes older slots for positions where a window applies. In a tree that is exact as long as the draft is no deeper than
            # the window; beyond, a drafted token may see one ancestor too many.
            mask_BWS = level_mask(length_B, self.view or cache.view(max(lengths) + self.drafted), self.above_BWA, self.drafted)
        final_BWD, _ = draft.forward(self.drafter.ids(tokens_BW), positions_BW, mask_BWS, cache, self.rows, starts)
        return self.drafter.logits(final_BWD)


def first_layers(model: Any, layers: int) -> Any:
    """The first `layers` layers of a transformers causal LM, with its embedding, final norm and lm_head, as a model of its own: a draft that needs no
    training and no memory, since the weights are the model's (draft-and-verify, arXiv 2309.08168). How good it is depends on the model: well
    if it was trained for early exits (LayerSkip, arXiv 2404.16710), badly otherwise.

    The model stays as it is; its weights must be ordinary (Target.load(…, packed=False).model). RecipeError for a packed one, or layers it has not.
    """
    config = model.config.get_text_config(decoder=True)
    if not 1 <= layers <= config.num_hidden_layers:
        raise RecipeError(f"first_layers: {layers} of a model of {config.num_hidden_layers} layers")
    if any(isinstance(module, PackedLinear | PackedSlice) for module in model.modules()):
        raise RecipeError("first_layers: the model's weights are packed; load it with packed=False, cut it, and pack both (Target.from_model)")
    # Everything but the weights is copied: each model then has its own config, from which the layers read their kind of attention.
    cut = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    config = cut.config.get_text_config(decoder=True)
    decoder = cut.get_decoder()
    name, stack = next((n, m) for n, m in decoder.named_children() if isinstance(m, torch.nn.ModuleList) and len(m) == config.num_hidden_layers)
    setattr(decoder, name, stack[:layers])
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    return cut
