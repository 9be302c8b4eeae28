"""The Drafter contract. A drafter proposes; it knows no acceptance rule, and nobody but `decode` calls it.

Rows: `decode` keeps its active rows in slots 0 … B−1. A new prompt `start`s in a slot; when a row finishes, the last active row is
`move`d into its slot, so the active rows are always a prefix.

Pairing: the target's feature at position t goes with the token at t+1. After prefill of x_0 … x_{T-1} the target has chosen x_T (the
root): the pairs (f_t, x_{t+1}), t = 0 … T−1 are complete. A round that accepts a drafts completes a+1 further pairs:
(f_root, d_1) … (f_{d_a}, bonus).

Shape suffixes: B rows, M pairs of a round (padded), T prompt length, F feature width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.graphs import Graphs
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.inference.shapes import MOST_NODES, Shape
from draftheads.recipes.schema import RecipeError


@dataclass(frozen=True)
class Plan:
    """How much to draft in this round: gamma, the longest chain; tree: a tree instead of a chain, for drafters that can grow one (its own
    depth counts, not gamma); `room_B` caps either per row, or None: tokens that may still be written beside the one that every round
    emits; 0 wants no drafts."""

    gamma: int = 4
    room_B: tuple[int, ...] | None = None
    tree: Shape | None = None

    def __post_init__(self) -> None:
        if self.gamma > MOST_NODES:
            raise RecipeError(f"gamma {self.gamma}: a draft has at most {MOST_NODES} tokens")

    @property
    def depth(self) -> int:
        """Most drafted tokens that one round can accept."""
        return self.gamma if self.tree is None else self.tree.depth

    @property
    def drafts(self) -> int:
        """Most drafted tokens of one round's tree, the root not counted."""
        return self.gamma if self.tree is None else self.tree.nodes


class Drafter(ABC):
    """taps: the target states it wants (see Target.forward); () for drafters that only read tokens."""

    name: str = "drafter"
    taps: tuple[int | str, ...] = ()
    graphs: Graphs | None = None
    decoding: bool = False

    def claim(self) -> None:
        """A decode() begins: the rows' state is its alone until `release`. RecipeError while another one has it."""
        if self.decoding:
            raise RecipeError(f"drafter {self.name} is in the middle of another decode(): finish or close that one first, or make a second drafter")
        self.decoding = True

    def release(self) -> None:
        """That decode() has ended, or was given up."""
        self.decoding = False

    def lend(self, graphs: Graphs | None) -> None:
        """Before `reset`: where to capture draft steps as CUDA graphs, None to run them eagerly. A drafter may ignore it."""
        self.graphs = graphs

    @abstractmethod
    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        """Forget everything; make room for `batch` rows of at most `max_len` tokens."""

    @abstractmethod
    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        """A new prompt in slot `row`: its token ids x_0 … x_{T-1}, the root x_T, and f_0 … f_{T-1} (None without taps)."""

    @abstractmethod
    def move(self, source: int, to: int) -> None:
        """Row `source`'s state now lives in slot `to`."""

    @abstractmethod
    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        """After a round: per active row its counts_B new tokens (accepted drafts, then the bonus token, which is the next root), and at
        column i the feature that pairs with token i. Called on every drafter after every round, also on one that did not draft.
        tokens_BM and counts_B are on the CPU whatever the device (the host has read them already), features_BMF are on the device."""

    @abstractmethod
    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        """A tree per active row, trimmed to the widest row; rows may be shorter (valid_BN). Root alone is a legal answer.
        `decode` passes a RowSampling (one temperature a row) and noise keyed to this round."""
