"""TrainStep: one micro-batch → its share of the loss, and metric sums. What accelerate wraps, so that DDP's hooks run.

    aligned ─► head.unroll ─► states of step j
    chunk of teacher positions s ─► teacher logits of the draft vocabulary, once ─► for each step j: the slot s−1−j, its draft logits,
                                    loss (heads/losses.py, weighted by train.loss), gradient

Chunks run over *teacher positions*, because p at position s is the target of slot s−1 at step 0, of s−2 at step 1, …: one product with
the target's lm_head serves all steps. A chunk's gradient is taken in the forward pass and its logits are dropped: no [T, V] is ever kept
and nothing is computed twice (as Liger's chunked losses do). `carry` hands these gradients to autograd.

The loss of a global batch is Σ_j loss_decay^j Σ_slots weight · loss / normaliser. normalise `sequence`: weight 1 / (the row's slots at step 0),
normaliser = rows with a slot; `token`: weight 1, normaliser = slots at step 0. The normaliser counts the whole global batch, so neither
micro-batches nor processes change the loss. Where a head trains a random part of the slots (DraftHead.thin), that part stands for the whole row.

Shape suffixes: B rows, T slots, J unroll steps, C teacher positions of a chunk, D hidden, U draft vocabulary, V target vocabulary,
S = B·T flat slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.heads.base import DraftHead
from draftheads.heads.losses import CONFIDENCE, STATES, Slots, Teacher, combined
from draftheads.recipes.schema import TrainSection
from draftheads.train.align import Aligned
from draftheads.train.figures import metric_sums
from draftheads.train.tuned import Held, Tuned, with_features


@dataclass
class Chunk:
    """teacher_C int64, flat positions s; labels_C int64, the token after s; slots_JC int64, the flat slot that step j trains against s
    (S where there is none); weights_JC float32, loss_decay^j · the row's weight (0 where there is none).

    rows_J: per step int64 [M], which of the C positions it trains, where they are few (a head that thins its slots, the ends of answers): the
    others' logits are then not computed. None: all C are gone through. Found on the host, as their number must be known there."""

    teacher_C: Tensor
    labels_C: Tensor
    slots_JC: Tensor
    weights_JC: Tensor
    rows_J: list[Tensor | None]

    def to(self, device: torch.device) -> Chunk:
        teacher_C, labels_C, slots_JC, weights_JC = (
            x.to(device, non_blocking=True) for x in (self.teacher_C, self.labels_C, self.slots_JC, self.weights_JC))
        return Chunk(teacher_C, labels_C, slots_JC, weights_JC, [None if x is None else x.to(device, non_blocking=True) for x in self.rows_J])

    @classmethod
    def of(cls, teacher_C: Tensor, labels_C: Tensor, slots_JC: Tensor, weights_JC: Tensor, none: int) -> Chunk:
        """none: the slot that stands for no slot."""
        rows_J = [(slots_C < none).nonzero().flatten() for slots_C in slots_JC]
        # Gathering the teacher's rows costs a copy, which pays where most of them are left out.
        few = [2 * len(rows_M) <= len(teacher_C) for rows_M in rows_J]
        return cls(teacher_C, labels_C, slots_JC, weights_JC, [r if f else None for r, f in zip(rows_J, few, strict=True)])


def chunks_of(aligned: Aligned, train: TrainSection, known_V: Tensor, size: int | None = None) -> list[Chunk]:
    """Gather the loss slots of a micro-batch by teacher position. Runs on the host: on an accelerator, finding them would stall the stream.

    known_V: bool [V], the token is in the draft vocabulary; train.drop_out_of_vocab leaves slots with other labels out of the loss.
    size: teacher positions of a chunk, default train.loss_chunk.
    """
    valid_BTJ = aligned.batch.valid_BTJ
    if train.drop_out_of_vocab:
        valid_BTJ = valid_BTJ & known_V[aligned.labels_BTJ]
    B, T, J = valid_BTJ.shape
    share_B = valid_BTJ[..., 0].sum(1).float()
    if aligned.kept_BTJ is not None:
        valid_BTJ = valid_BTJ & aligned.kept_BTJ
    kept_B = valid_BTJ[..., 0].sum(1).clamp(min=1)
    weight_B = 1 / kept_B if train.normalise == "sequence" else share_B / kept_B
    slots_JS = torch.full((J, B * T), B * T)
    weights_JS = torch.zeros(J, B * T)
    labels_S = torch.zeros(B * T, dtype=torch.int64)
    for j in range(J):
        slot_M = valid_BTJ[..., j].flatten().nonzero().flatten()
        teacher_M = aligned.teacher_index_BTJ[..., j].flatten()[slot_M]
        slots_JS[j, teacher_M] = slot_M
        weights_JS[j, teacher_M] = train.loss_decay**j * weight_B[slot_M // T]
        labels_S[teacher_M] = aligned.labels_BTJ[..., j].flatten()[slot_M]
    needed = (slots_JS < B * T).any(0).nonzero().flatten()
    parts = [c for c in needed.split(size or train.loss_chunk) if len(c)]
    return [Chunk.of(c, labels_S[c], slots_JS[:, c].clone(), weights_JS[:, c].clone(), B * T) for c in parts]


def chunk_size(train: TrainSection, draft_vocab: int, device: torch.device) -> int:
    """train.loss_chunk; on a CPU at most as many as keep [C, U] below 8 MB: larger tensors leave the cache, and beyond 32 MB the allocator
    maps fresh pages for each one, which costs more than the arithmetic (measured: 290 tokens/s at 2048, 400 at 256)."""
    return train.loss_chunk if device.type != "cpu" else max(1, min(train.loss_chunk, 2**21 // draft_vocab))


class TrainStep(nn.Module):
    """head, and the target's lm_head rows of the draft vocabulary: teacher_UD float32. finish: what the target's family does to its
    logits after lm_head (softcap, scale), elementwise; None for nothing. loss: names and weights, see heads/losses.py."""

    teacher_UD: Tensor
    target_ids_U: Tensor
    known_V: Tensor
    draft_ids_V: Tensor

    def __init__(self, head: DraftHead, teacher_UD: Tensor, finish: Callable[[Tensor], Tensor] | None = None,
                 loss: Mapping[Any, float] | None = None, tuned: Tuned | None = None) -> None:
        super().__init__()
        self.head, self.tuned = head, tuned
        self.finish = finish
        self.loss = {"soft_ce": 1.0} if loss is None else dict(loss)
        self.register_buffer("teacher_UD", teacher_UD.detach().float(), persistent=False)
        draft_ids_U = torch.arange(head.d2t.numel(), device=head.d2t.device)
        self.register_buffer("target_ids_U", head.target_ids(draft_ids_U), persistent=False)
        known_V = torch.zeros(head.geometry.vocab_size, dtype=torch.bool, device=head.d2t.device).index_fill(0, self.target_ids_U, True)
        self.register_buffer("known_V", known_V, persistent=False)
        draft_ids_V = torch.full_like(known_V, -1, dtype=torch.int64).index_copy(0, self.target_ids_U, draft_ids_U)
        self.register_buffer("draft_ids_V", draft_ids_V, persistent=False)
        # DDP would broadcast the target's tables at every forward.
        frozen = [] if tuned is None else [f"tuned.{name}" for name, p in tuned.named_parameters() if not p.requires_grad]
        self._ddp_params_and_buffers_to_ignore = [*(name for name, _ in self.named_buffers()), *frozen]

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The head's and, behind them, the adapter's."""
        return [*self.head.trainable_parameters(), *self.adapter()]

    def adapter(self) -> list[nn.Parameter]:
        return [] if self.tuned is None else list(self.tuned.adapter().values())

    def saved(self) -> dict[str, Tensor]:
        """What a resumable state holds of the weights: the head's tensors, and the adapter's as adapter.NAME."""
        adapter = {} if self.tuned is None else {f"adapter.{name}": p.detach() for name, p in self.tuned.adapter().items()}
        return self.head.state_dict() | adapter

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """The reverse of `saved`."""
        self.head.load_state_dict({name: t for name, t in saved.items() if not name.startswith("adapter.")})
        for name, parameter in ({} if self.tuned is None else self.tuned.adapter()).items():
            parameter.copy_(saved[f"adapter.{name}"])

    def forward(self, aligned: Aligned, chunks: Sequence[Chunk], normaliser: float, held: Sequence[Held] = (),
                head_weight: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (0-dim, with gradient; already divided by the normaliser) and metric sums (detached, on the device).

        With a tuned target (train.lora): head_weight · the head's loss + KL at the positions of `held`; the metric `loss` is the head's alone.
        A micro-batch without loss slots, or without rows, is legal: its loss is 0 and every parameter gets a zero gradient.
        """
        S, J = aligned.lse_BT.numel(), aligned.batch.valid_BTJ.shape[-1]
        params = self.head.trainable_parameters()
        final_SD = aligned.final_BTD.flatten(0, 1)[:0]
        if self.tuned is not None and S and (chunks or held):
            assert aligned.ids_BT is not None
            final_BTD, features_BTF = self.tuned(aligned.ids_BT)
            final_SD, aligned = final_BTD.flatten(0, 1), with_features(aligned, features_BTF)
        states_J = self.head.unroll(aligned.batch, J).states if chunks else []
        flat_J = [s.reshape(S, -1) for s in states_J]
        # Row S of the scratch buffers takes the results of slots that do not exist.
        state_grads_J = [s.new_zeros(S + 1, s.shape[-1]) for s in flat_J]
        param_grads: list[Tensor | None] = [None] * len(params)
        hits_SJ = torch.zeros(S + 1, J, dtype=torch.bool, device=aligned.lse_BT.device)
        loss = aligned.lse_BT.new_zeros(())
        for chunk in chunks:
            final_CD = aligned.final_BTD.flatten(0, 1)[chunk.teacher_C]
            all_C = Teacher(self.teacher_logits(final_CD), aligned.lse_BT.flatten()[chunk.teacher_C], self.draft_ids_V[chunk.labels_C],
                            final_CD if STATES & self.loss.keys() else None)
            for j, rows_M in enumerate(chunk.rows_J):
                if rows_M is not None and not len(rows_M):
                    continue
                teacher, slots_C, labels_C, weights_C = all_C, chunk.slots_JC[j], chunk.labels_C, chunk.weights_JC[j]
                if rows_M is not None:
                    teacher, slots_C, labels_C, weights_C = all_C.at(rows_M), slots_C[rows_M], labels_C[rows_M], weights_C[rows_M]
                state_CD = flat_J[j].detach()[slots_C.clamp(max=S - 1)].requires_grad_(torch.is_grad_enabled())
                logits_CU = self.head.logits(state_CD, j).float()
                slots = Slots(logits_CU, teacher, self.head.regressed(state_CD) if STATES & self.loss.keys() else None,
                              self.head.confidence(state_CD) if CONFIDENCE & self.loss.keys() else None)
                part = (combined(slots, self.loss) * (weights_C / normaliser)).sum() * head_weight
                if torch.is_grad_enabled():
                    grads = torch.autograd.grad(part, [state_CD, *params], allow_unused=True)
                    state_grads_J[j][slots_C] = grads[0].to(state_grads_J[j].dtype)
                    param_grads = [a if b is None else b if a is None else a + b for a, b in zip(param_grads, grads[1:], strict=True)]
                hits_SJ[slots_C, j] = self.target_ids_U[logits_CU.detach().argmax(-1)] == labels_C
                loss = loss + part.detach()
        metrics = metric_sums(loss / head_weight, hits_SJ[:S].view(aligned.answers_BTJ.shape), aligned, self.known_V)
        if torch.is_grad_enabled():
            loss = carry(loss, flat_J, [g[:S] for g in state_grads_J]) + carry(torch.zeros_like(loss), params, param_grads)
        if self.tuned is not None:
            metrics["kl"], grad_SD = self.tuned.drift(final_SD, aligned.final_BTD.flatten(0, 1), held, normaliser)
            loss = loss + metrics["kl"]
            if torch.is_grad_enabled():
                adapter = self.adapter()
                loss = carry(loss, [final_SD, *adapter], [grad_SD, *([None] * len(adapter))])
        return loss, metrics

    @torch.no_grad()
    def teacher_logits(self, final_CD: Tensor) -> Tensor:
        """float32 [C,U], in float32 under autocast too: p = exp(logit − lse) turns the rounding of a logit of 30 into percents."""
        with torch.autocast(final_CD.device.type, enabled=False):
            logits_CU = F.linear(final_CD.float(), self.teacher_UD)
        return logits_CU if self.finish is None else self.finish(logits_CU)


def carry(value: Tensor, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor:
    """`value`, with d value / d tensors[i] = grads[i] (None = 0: DDP wants every parameter in the graph, every time)."""
    for tensor, grad in zip(tensors, grads, strict=True):
        linear = (tensor * grad).sum() if grad is not None else tensor.sum() * 0
        value = value + (linear - linear.detach())
    return value
