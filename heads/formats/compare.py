"""Is an exported head the same head? Both are run over one random batch: what is written is not trusted, but read again and compared.

Shape suffixes: B rows, T slots, J unroll steps, F feature width.
"""

from __future__ import annotations

import torch

from draftheads.heads.base import DraftBatch, DraftHead
from draftheads.heads.formats import Tables
from draftheads.recipes.schema import RecipeError


@torch.no_grad()
def compare(original: DraftHead, again: DraftHead, tables: Tables) -> float:
    """Both heads over one random batch. -> the largest difference of their logits. RecipeError where it is no rounding error."""
    again.borrow(tables.embed_VD, tables.lm_head_VD)
    steps = unroll_steps(original)
    batch = random_batch(original, steps)
    worst = 0.0
    for j, (a, b) in enumerate(zip(original.unroll(batch, steps).states, again.unroll(batch, steps).states, strict=True)):
        valid_BT = batch.valid_BTJ[..., j]
        expected, found = original.logits(a, j)[valid_BT], again.logits(b, j)[valid_BT]
        if expected.shape != found.shape:
            raise RecipeError(f"the exported head has logits {tuple(found.shape)} at step {j}, the original {tuple(expected.shape)}: not exported")
        difference = float((expected - found).abs().max() / expected.abs().max().clamp(min=1))
        worst = max(worst, difference)
        if not difference <= 1e-6:
            raise RecipeError(f"the exported head's logits differ from the original's by {difference:.1e} at step {j}: not exported; this is a bug, "
                              "please report it")
    return worst


def unroll_steps(head: DraftHead) -> int:
    """Some number of unroll steps that the head can do."""
    for steps in (*([head.max_depth] if head.max_depth else [3]), *range(1, 33)):
        try:
            head.check_steps(steps)
        except RecipeError:
            continue
        return steps
    raise ValueError(f"a {head.config.type} head that can be unrolled to no number of steps from 1 to 32")


def random_batch(head: DraftHead, steps: int) -> DraftBatch:
    """Two rows, the second padded; all slots count."""
    B, T, V = 2, 12, head.geometry.vocab_size
    generator = torch.Generator().manual_seed(0)
    documents_BT = torch.zeros(B, T, dtype=torch.long)
    documents_BT[1, T - 3 :] = -1
    features_BTF = torch.randn(B, T, len(head.taps) * head.geometry.hidden_size, generator=generator)
    tokens_BTJ = torch.randint(V, (B, T, steps), generator=generator)
    return DraftBatch(features_BTF, tokens_BTJ, torch.arange(T).expand(B, T).contiguous(), documents_BT,
                      (documents_BT >= 0)[..., None].expand(B, T, steps).contiguous())
