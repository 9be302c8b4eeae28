"""What happens at which optimizer step: its rows, its unroll steps, its learning rate. Pure functions of the recipe and the rows' lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from draftheads.data.batches import plan
from draftheads.recipes.schema import TrainSection


@dataclass
class Schedule:
    """Which rows make which optimizer step. rows, lengths: the usable rows; shares: their loss slots at step 0."""

    train: TrainSection
    rows: list[int]
    lengths: list[int]
    shares: list[int]
    world: int
    _epochs: dict[int, Any] = field(default_factory=dict)

    def epoch(self, epoch: int) -> list[list[list[list[int]]]]:
        if epoch not in self._epochs:
            self._epochs = {e: p for e, p in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = plan(self.lengths, batch_tokens=self.train.batch_tokens, micro_tokens=self.train.micro_batch_tokens,
                                       seed=self.train.seed, epoch=epoch, world=self.world)
        batches: list[list[list[list[int]]]] = self._epochs[epoch]
        return batches

    def steps(self) -> list[tuple[int, int]]:
        """(epoch, index) of every optimizer step of the run."""
        found: list[tuple[int, int]] = []
        epoch = 0
        while len(found) < self.train.steps if self.train.steps is not None else epoch < self.train.epochs:
            count = len(self.epoch(epoch))
            if self.train.steps is None:
                count = max(1, round(count * min(1.0, self.train.epochs - epoch)))
            found += [(epoch, index) for index in range(count)]
            epoch += 1
        return found[: self.train.steps]

    def tokens(self, batch: list[list[list[int]]]) -> int:
        return sum(self.lengths[i] for rank in batch for micro in rank for i in micro)

    def normaliser(self, batch: list[list[list[int]]]) -> float:
        """What the loss of this global batch is divided by: rows with loss slots, or slots."""
        shares = [self.shares[i] for rank in batch for micro in rank for i in micro]
        return float(max(1, sum(s > 0 for s in shares) if self.train.normalise == "sequence" else sum(shares)))


def unroll_steps(step: int, total: int, train: TrainSection) -> int:
    """Unroll steps J at this optimizer step."""
    return next(stage.steps for stage in train.unroll if step < stage.until * total or stage.until == 1.0)


def rate(step: int, total: int, train: TrainSection) -> float:
    """The learning rate of optimizer step `step`: linear warmup, then flat, or cosine, or flat and at last linear down (WSD)."""
    warmup = round(train.warmup * total)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    if train.schedule == "constant":
        return train.lr
    falling = total - warmup if train.schedule == "cosine" else max(1, round(train.decay * total))
    done = max(0.0, (step + 1 - (total - falling)) / falling)
    left = (1 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr + (1 - train.min_lr) * left)


def head_weight(step: int, total: int, train: TrainSection) -> float:
    """What the head's loss weighs at this optimizer step: 1, or beside the KL of train.lora its head_weight, after a linear rise from 0."""
    if train.lora is None:
        return 1.0
    rising = round(train.lora.head_warmup * total)
    return train.lora.head_weight * (min(1.0, (step + 1) / rising) if rising else 1.0)


def costs(total: int, train: TrainSection) -> list[float]:
    """costs[s]: the work of the first s steps, in unrolled steps; for the ETA. A step costs its unroll steps and, once, its teacher."""
    found = [0.0]
    for step in range(total):
        found.append(found[-1] + unroll_steps(step, total, train) + 0.5)
    return found
