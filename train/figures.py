"""Training metrics: sums on the device, added over micro-batches, steps and processes, and read only when somebody looks.

τ here is the teacher-forced estimate of what decoding measures: a slot is a round, and its accepted drafts are the hits before the first
miss. A label outside the draft vocabulary is a miss. Nothing is a product of marginal accuracies, which overestimates (hits come together).

Shape suffixes: B rows, T slots, J unroll steps, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.train.align import Aligned

VECTORS = ("answers", "slots", "hits", "prefix")  # one figure per unroll step


@torch.no_grad()
def metric_sums(loss: Tensor, hits_BTJ: Tensor, aligned: Aligned, known_V: Tensor) -> dict[str, Tensor]:
    """Sums that can be added over micro-batches and processes; `summarise` turns them into figures. Over answer slots, whatever is
    supervised; a slot whose true token is outside the draft vocabulary is among them, and is a miss."""
    answers_BTJ, kept_BTJ = aligned.answers_BTJ, aligned.kept_BTJ
    begun_BTJ = answers_BTJ[..., :1] if kept_BTJ is None else answers_BTJ[..., :1] & kept_BTJ
    if kept_BTJ is not None:
        answers_BTJ = answers_BTJ & kept_BTJ
    hits_BTJ = hits_BTJ & answers_BTJ
    return {
        "loss": loss.detach(),
        "supervised": aligned.batch.valid_BTJ[..., 0].sum().float(),
        "known": (known_V[aligned.labels_BTJ[..., 0]] & answers_BTJ[..., 0]).sum().float(),
        "answers": answers_BTJ.sum((0, 1)).float(),
        # Slots that were unrolled to this step: a window may hold optimizer steps of a shorter and of a longer unrolling, and a head may train deep
        # steps at some slots only.
        "slots": begun_BTJ.sum((0, 1)).float().expand(answers_BTJ.shape[-1]),
        "hits": hits_BTJ.sum((0, 1)).float(),
        "prefix": hits_BTJ.to(torch.uint8).cummin(-1).values.sum((0, 1)).float(),
    }


def summarise(sums: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Figures of a window of optimizer steps.

    tau       1 + mean over answer slots of the drafts accepted before the first miss, greedy, at most `steps` of them, bonus token included;
              the mean of an unroll step is over the slots that were unrolled so far
    accuracy  per unroll step, hits / answer slots of that step
    coverage  share of the answers' tokens that are in the draft vocabulary
    loss      mean over the optimizer steps
    kl        where the target is tuned (train.lora): KL(original ‖ tuned), nats a token, mean over the optimizer steps
    """
    answers = [max(a, 1.0) for a in sums["answers"]]
    return {
        "loss": sums["loss"][0] / max(sums["updates"][0], 1.0),
        "tau": 1 + sum(p / max(s, 1.0) for p, s in zip(sums["prefix"], sums["slots"], strict=True)),
        "accuracy": [h / a for h, a in zip(sums["hits"], answers, strict=True)][:steps],
        "coverage": sums["known"][0] / answers[0],
        "supervised": sums["supervised"][0],
        **({"kl": sums["kl"][0] / max(sums["updates"][0], 1.0)} if "kl" in sums else {}),
    }


class Window:
    """Sums since the last log record, in float64, so that a resumed window ends in the same bits.

    most: the most unroll steps of any stage; total: the sums a resumed run begins with (give them to one process only).
    """

    def __init__(self, most: int, total: dict[str, list[float]] | None = None) -> None:
        self.most = most
        self.sums = {name: torch.tensor(values, dtype=torch.float64) for name, values in (total or {}).items() if name != "updates"}
        self.updates = int(total["updates"][0]) if total else 0

    def add(self, sums: dict[str, Tensor]) -> None:
        """One micro-batch, as TrainStep returns it."""
        for name, value in sums.items():
            padded = F.pad(value.double().flatten(), (0, (self.most if name in VECTORS else 1) - value.numel()))
            self.sums[name] = self.sums[name].to(value.device) + padded if name in self.sums else padded

    def totals(self, accelerator: Any) -> dict[str, list[float]]:
        """Over all processes: each of them must ask."""
        names = sorted(self.sums)
        packed = torch.cat([self.sums[n] for n in names])
        if accelerator.num_processes > 1:
            packed = accelerator.reduce(packed, "sum")
        parts = packed.cpu().split([self.sums[n].numel() for n in names])
        return {n: p.tolist() for n, p in zip(names, parts, strict=True)} | {"updates": [float(self.updates)]}
