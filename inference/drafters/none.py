"""No drafts: the root alone. `decode` with this drafter is autoregressive decoding, the baseline, on the same code path."""

from __future__ import annotations

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling


class NoDrafter(Drafter):
    """Remembers each row's last token, nothing else."""

    name = "none"

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        self.root_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.parents_B1 = torch.full((batch, 1), -1, device=device)
        self.valid_B1 = torch.ones(batch, 1, dtype=torch.bool, device=device)

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        self.root_B[row] = root

    def move(self, source: int, to: int) -> None:
        self.root_B[to] = self.root_B[source]

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        B, M = tokens_BM.shape
        self.root_B[:B] = tokens_BM[:, 0] if M == 1 else tokens_BM.gather(1, counts_B[:, None] - 1)[:, 0]  # from the CPU, if need be

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        B = len(noise.seeds_B)
        return DraftTree(self.root_B[:B, None], self.parents_B1[:B], self.valid_B1[:B], chained=True)
