"""A head that starts with induction copies before it has learned anything: tied and untied embeddings, and the mutants that must not."""

from __future__ import annotations

import pytest
import torch

from draftheads.heads import build_head, induction
from draftheads.heads.base import DraftBatch
from draftheads.recipes.schema import Geometry

V, H, L, J = 512, 256, 96, 3
GEOMETRY = Geometry(hidden_size=H, intermediate_size=96, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=V, max_positions=512,
                    rope_parameters={"rope_type": "default", "rope_theta": 100000.0})


class World:
    """A target whose states are random functions of its tokens: the lowest tap holds the token at the slot under noise, the others nothing."""

    def __init__(self, tied: bool) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.embed_VD, lm_head_VD, self.mixing_HH = self.randn(V, H), self.randn(V, H), self.randn(H, H) / H**0.5
        # An untied lm_head is another space, in which like tokens still are alike.
        self.lm_head_VD = self.embed_VD if tied else self.embed_VD @ torch.linalg.qr(self.randn(H, H))[0] + 0.3 * lm_head_VD

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def head(self, seed: int = 0, **section):
        torch.manual_seed(seed)
        head = build_head({"type": "eagle3", "draft_vocab_size": V // 2} | section, GEOMETRY, torch.arange(0, V, 2))
        head.borrow(self.embed_VD, self.lm_head_VD)
        return head

    def batch(self, ids_X: torch.Tensor) -> DraftBatch:
        """One row of len(ids) − J − 1 slots."""
        T = len(ids_X) - J - 1
        taps_TKH = torch.stack([self.embed_VD[ids_X[:T]] @ self.mixing_HH + 0.3 * self.randn(T, H), self.randn(T, H), self.randn(T, H)], 1)
        tokens_TJ = torch.stack([ids_X[1 + j : 1 + j + T] for j in range(J)], -1)
        return DraftBatch(taps_TKH.flatten(1)[None], tokens_TJ[None], torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long),
                          torch.ones(1, T, J, dtype=torch.bool))

    def samples(self, rows: int = 20):
        return [self.batch(torch.randint(V, (L,), generator=self.generator)) for _ in range(rows)]

    def copied(self, head) -> list[float]:
        """Share of drafts, by step, that go on with what followed the same token before: a text of distinct tokens, twice."""
        ids_L = torch.randperm(V // 2, generator=self.generator)[:L] * 2  # in the draft vocabulary
        ids_X = torch.cat([ids_L, ids_L])
        batch = self.batch(ids_X)
        T = batch.tokens_BTJ.shape[1]
        with torch.no_grad():
            states = head.unroll(batch, J).states
        second = torch.arange(L, T)
        return [float((head.target_ids(head.logits(states[j][0, second]).argmax(-1)) == ids_X[second + 2 + j]).float().mean()) for j in range(J)]


@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_head_copies_at_every_step(tied):
    world = World(tied)
    head = world.head()
    assert max(world.copied(head)) < 0.1
    head.fit_start(world.samples())
    assert min(world.copied(head)) > 0.8


def test_without_the_option_nothing_is_set():
    world = World(True)
    head = world.head(induction_init=False)
    before = {k: v.clone() for k, v in head.state_dict().items()}
    head.fit_start(world.samples())
    assert all(torch.equal(v, before[k]) for k, v in head.state_dict().items())


def test_the_same_seed_and_rows_give_the_same_start():
    states = []
    for _ in range(2):
        world = World(True)
        head = world.head()
        head.fit_start(world.samples())
        states.append(head.state_dict())
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())


@pytest.mark.parametrize("mutant", ["token fed instead of the token at the slot", "lm_head in the embedding's space", "fast rotary dimensions"])
def test_mutants_do_not_copy(mutant, monkeypatch):
    world = World(tied=False)
    head, samples = world.head(), world.samples()
    if mutant.startswith("token"):
        for batch in samples:
            batch.tokens_BTJ = batch.tokens_BTJ.roll(-1, 1)
    elif mutant.startswith("lm_head"):
        monkeypatch.setattr(induction, "_rotation", lambda x, y: torch.eye(H, dtype=torch.float64))
    else:
        real = induction.induction_init
        monkeypatch.setattr("draftheads.heads.eagle3.induction_init", lambda a, fc, inv_freq, *rest: real(a, fc, inv_freq * 0, *rest))
        head._rotary[0].inv_freq.fill_(0.1)  # half a turn, and more, at the distance of the copies
    head.fit_start(samples)
    assert min(world.copied(head)) < 0.3


def test_one_short_row_and_a_dead_tap_are_no_trouble():
    world = World(True)
    head, (batch,) = world.head(), world.samples(1)
    rest = (batch.tokens_BTJ, batch.positions_BT, batch.documents_BT, batch.valid_BTJ)
    head.fit_start([DraftBatch(torch.zeros_like(batch.features_BTF[:, :2]), *(x[:, :2] for x in rest))])
    assert all(p.isfinite().all() for p in head.parameters())


def test_a_head_wider_than_the_hidden_state_starts_random():
    geometry = GEOMETRY.model_copy(update={"head_dim": 512})
    head = build_head({"type": "eagle3"}, geometry)
    head.borrow(torch.randn(V, H), torch.randn(V, H))
    head.fit_start([])
