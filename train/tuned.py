"""The target while it is tuned along with a head (train.lora): its states with gradients, and how far it has moved from the original. Medusa-2,
arXiv 2401.10774 §2.2.2, with the self-distillation of §2.3.2: the original's own answers, and its distribution in place of their tokens.

    ids ─► the decoder with the adapter ─► taps ─► what the head reads, with gradients ─► …
                                       └─► final states ─► KL(original ‖ tuned), whole vocabulary, chunk by chunk

Rows are what the original answered, and their stored states are the original's: no second forward asks it. It is also the teacher of the head's own
loss, as the paper's labels are the original's tokens: a target that stays still, and needs no further product with lm_head. The KL keeps the tuned
target, which will judge the drafts, close to it.

Shape suffixes: B rows, T slots, C positions of a chunk, D hidden, F feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.heads.losses import Slots, Teacher, kl
from draftheads.inference.adapter import add_adapter
from draftheads.inference.taps import Tapped, Taps
from draftheads.inference.target import Target
from draftheads.recipes.schema import LoraSection, TrainSection
from draftheads.train.align import Aligned


@dataclass
class Held:
    """A chunk of positions at which the tuned target is held to the original. slots_C int64, flat; weights_C float32."""

    slots_C: Tensor
    weights_C: Tensor

    def to(self, device: torch.device) -> Held:
        return Held(self.slots_C.to(device, non_blocking=True), self.weights_C.to(device, non_blocking=True))


def held_of(aligned: Aligned, train: TrainSection, known_V: Tensor, size: int) -> list[Held]:
    """Every position whose next token is supervised (with train.supervise answers: the target wrote it), at most `size` a chunk. Runs on the host.

    A row weighs what it weighs in the head's loss, so that one normaliser serves both: 1, or with normalise `token` its loss slots at step 0; its
    positions share that, and the sum over a batch is a mean KL in nats a token.
    """
    assert aligned.next_BT is not None
    next_BT = aligned.next_BT
    pairs_BT = next_BT & torch.cat([next_BT[:, 1:], next_BT.new_zeros(len(next_BT), 1)], 1)  # loss slots at step 0, before any are thinned out
    if train.drop_out_of_vocab:
        pairs_BT = pairs_BT & known_V[aligned.labels_BTJ[..., 0]]
    share_B = pairs_BT.sum(1).float()
    weight_B = ((share_B > 0).float() if train.normalise == "sequence" else share_B) / next_BT.sum(1).clamp(min=1)
    slots_S = next_BT.flatten().nonzero().flatten()
    T = next_BT.shape[1]
    return [Held(slots_C, weight_B[slots_C // T]) for slots_C in slots_S.split(size) if len(slots_C)]


class Tuned(nn.Module):
    """target: loaded unpacked (packed=False); the adapter is put into its layers. taps: the head's."""

    def __init__(self, target: Target, lora: LoraSection, taps: Taps) -> None:
        super().__init__()
        self.model: Any = add_adapter(target.model, lora)
        # A plain attribute would make the decoder a second child, and every weight appear twice.
        self._parts = (target.decoder, target.layers)
        self.taps, self.finish = taps, target.finish_logits
        self.lm_head_VD: Tensor
        self.register_buffer("lm_head_VD", target.lm_head_VD.float(), persistent=False)
        self.train()

    def train(self, mode: bool = True) -> Tuned:
        """Only the adapter's dropout knows a training mode: the target's own (some families have dropout) stays off."""
        super().train(False)
        for name, module in self.model.named_modules():
            if "lora_dropout" in name:
                module.training = mode
        return self

    def adapter(self) -> dict[str, nn.Parameter]:
        """Its parameters, float32, by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """-> final_BTD, features_BTF, float32. Rows are padded at their right, so that causal attention alone hides the padding."""
        decoder, layers = self._parts
        # In its own dtype, as it will decode: under autocast even an adapter without effect would seem to have moved it.
        with torch.autocast(ids_BT.device.type, enabled=False), Tapped(layers, self.taps) as tapped:
            final_BTD = decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
            features_BTF = tapped.features(final_BTD)
        assert features_BTF is not None
        return final_BTD.float(), features_BTF.float()

    def logits(self, final_CD: Tensor) -> Tensor:
        """float32 [C, V], under autocast too."""
        with torch.autocast(final_CD.device.type, enabled=False):
            logits_CV: Tensor = self.finish(F.linear(final_CD.float(), self.lm_head_VD))
        return logits_CV

    def drift(self, final_SD: Tensor, original_SD: Tensor, held: Sequence[Held], normaliser: float) -> tuple[Tensor, Tensor]:
        """Σ weight · KL(original ‖ tuned) / normaliser (0-dim, detached), and its gradient by final_SD.

        final_SD, original_SD: post-norm states of all positions. The original's log-sum-exp is taken from the logits at hand, not from the store,
        whose states are rounded to fp16: so the KL is that of two distributions, at least 0, and 0 where the two states are the same.
        """
        total, grad_SD = final_SD.new_zeros(()), torch.zeros_like(final_SD)
        for chunk in held:
            with torch.no_grad():
                original_CV = self.logits(original_SD[chunk.slots_C])
            state_CD = final_SD.detach()[chunk.slots_C].requires_grad_(torch.is_grad_enabled())
            teacher = Teacher(original_CV, original_CV.logsumexp(-1), chunk.slots_C)
            part = (kl(Slots(self.logits(state_CD), teacher)) * (chunk.weights_C / normaliser)).sum()
            if torch.is_grad_enabled():
                grad_SD[chunk.slots_C] = torch.autograd.grad(part, state_CD)[0]
            total = total + part.detach()
        return total, grad_SD


def with_features(aligned: Aligned, features_BTF: Tensor) -> Aligned:
    """The same micro-batch, in which the head reads these states."""
    return replace(aligned, batch=replace(aligned.batch, features_BTF=features_BTF))
