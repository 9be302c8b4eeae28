"""HeadDrafter: a DraftHead as a Drafter; the only caller of a DraftHead's drafting methods.

The head is copied as drafting wants it (device, dtype, packed or int8 weights); all else is PairDrafter's.

Shape suffixes: U draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from draftheads.heads.base import DraftHead
from draftheads.heads.checkpoint import check_geometry, with_own
from draftheads.inference.drafters.pairs import PairDrafter
from draftheads.inference.growth import DraftVocab
from draftheads.inference.int8 import can_int8, int8_linears
from draftheads.inference.packed import pack_linears
from draftheads.inference.target import Target


class HeadDrafter(PairDrafter):
    """int8: on a CPU, draft with int8 weights (inference/int8.py): several times cheaper steps for a slightly worse draft. min_confidence and
    max_positions (the head's): as in PairDrafter. Ids beyond the tokenizer (padding rows of the lm_head) are never proposed.
    """

    name = "head"

    def __init__(self, head: DraftHead, target: Target, *, min_confidence: float = 0.0, int8: bool = False) -> None:
        check_geometry(head.geometry, with_own(target.geometry, head.own), "the head")
        copy, V = inference_copy(head, target, int8), target.geometry.vocab_size
        ids_U = copy.target_ids_U()
        usable = len(target.tokenizer) if target.tokenizer is not None else V
        vocab = DraftVocab(ids_U, V, ids_U >= usable if int(ids_U[-1]) >= usable else None)
        super().__init__(copy, vocab, getattr(head.config, "max_positions", None) or target.geometry.max_positions, min_confidence)
        self.int8, self.taps = int8, tuple(head.taps)


def inference_copy(head: DraftHead, target: Target, int8: bool = False) -> DraftHead:
    """The head as drafting wants it: on the target's device, in its dtype, weights borrowed, linears packed on a CPU. The original is
    left as it is (a packed head can neither train nor be saved)."""
    cpu = target.device.type == "cpu" and target.dtype == torch.float32
    with torch.random.fork_rng(devices=[]):  # a drafter made in mid-training leaves the training's random numbers alone
        copy = type(head).build(head.config, head.geometry, head.target_ids_U())
    copy.load_state_dict(head.state_dict())
    copy = copy.to(target.device, target.dtype).eval().requires_grad_(False)
    copy.borrow(target.embed_VD, target.lm_head_VD)
    if cpu and int8 and can_int8():
        int8_linears(copy)
    elif cpu:
        _own_linears(copy)
        pack_linears(copy)
    return copy


def _own_linears(module: nn.Module) -> None:
    """Subclasses of nn.Linear (borrowed weights) become plain ones on the same weight, so that they are packed too."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and type(child) is not nn.Linear:
                plain = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(child.weight.detach(), requires_grad=False)
                setattr(parent, name, plain)
