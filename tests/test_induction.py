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

    def __init__(self, tied: bool, scale: float = 1.0, **changes) -> None:
        self.generator, self.scale = torch.Generator().manual_seed(0), scale
        self.geometry = GEOMETRY.model_copy(update={"tie_word_embeddings": tied, **changes})
        self.H = self.geometry.hidden_size
        self.embed_VD, lm_head_VD, self.mixing_HH = self.randn(V, self.H), self.randn(V, self.H), self.randn(self.H, self.H) / self.H**0.5
        # An untied lm_head is another space, in which like tokens still are alike.
        self.lm_head_VD = self.embed_VD if tied else self.embed_VD @ torch.linalg.qr(self.randn(self.H, self.H))[0] + 0.3 * lm_head_VD

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def head(self, seed: int = 0, **section):
        torch.manual_seed(seed)
        head = build_head({"type": "eagle3", "draft_vocab_size": V // 2} | section, self.geometry, torch.arange(0, V, 2))
        head.borrow(self.embed_VD, self.lm_head_VD)
        return head

    def batch(self, ids_X: torch.Tensor, taps: int = 3) -> DraftBatch:
        """One row of len(ids) − J − 1 slots."""
        T = len(ids_X) - J - 1
        lowest_TH = self.embed_VD[ids_X[:T]] @ self.mixing_HH + 0.2 * self.randn(T, self.H)
        taps_TKH = torch.stack([lowest_TH, *self.randn(taps - 1, T, self.H)], 1) * self.scale
        tokens_TJ = torch.stack([ids_X[1 + j : 1 + j + T] for j in range(J)], -1)
        return DraftBatch(taps_TKH.flatten(1)[None], tokens_TJ[None], torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long),
                          torch.ones(1, T, J, dtype=torch.bool))

    def samples(self, rows: int = 40, taps: int = 3):
        return [self.batch(torch.randint(V, (L,), generator=self.generator), taps) for _ in range(rows)]

    def copied(self, head, taps: int = 3) -> list[float]:
        """Share of drafts, by step, that go on with what followed the same token before: a text of distinct tokens, twice."""
        ids_L = torch.randperm(V // 2, generator=self.generator)[:L] * 2  # in the draft vocabulary
        ids_X = torch.cat([ids_L, ids_L])
        batch = self.batch(ids_X, taps)
        T = batch.tokens_BTJ.shape[1]
        with torch.no_grad():
            states = head.unroll(batch, J).states
        second = torch.arange(L, T)
        return [float((head.target_ids(head.logits(states[j][0, second]).argmax(-1)) == ids_X[second + 2 + j]).float().mean()) for j in range(J)]


def weights(head) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in head.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_head_copies_at_every_step(tied, seed):
    world = World(tied)
    head = world.head(seed)
    assert max(world.copied(head)) < 0.1
    head.fit_start(world.samples())
    assert min(world.copied(head)) > 0.7


@pytest.mark.parametrize("changes", [
    {"num_heads": 8, "num_kv_heads": 8},  # every query head has its own keys; fewer copy than there are
    {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64},  # more key/value dimensions than hidden ones
    {"num_kv_heads": 1},
    {"hidden_size": 1536, "head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},  # wide: chance scores must not grow
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 128}},
], ids=["mha", "wide heads", "mqa", "wide", "llama3 rope"])
def test_other_geometries_copy(changes):
    world = World(True, **changes)
    head = world.head()
    head.fit_start(world.samples(60))
    assert world.copied(head)[0] > 0.6


def test_one_tap_and_a_trained_lm_head():
    world = World(False)
    head = world.head(taps=[2], freeze_lm_head=False)
    head.fit_start(world.samples(taps=1))
    assert min(world.copied(head, taps=1)) > 0.7


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_plain_eagle3_copies_at_any_scale_of_the_states(scale):
    world = World(True, scale)
    head = world.head(fc_norm=False)
    head.fit_start(world.samples())
    assert world.copied(head)[0] > 0.6


def test_without_the_option_nothing_is_set():
    world = World(True)
    head = world.head(induction_init=False)
    before = weights(head)
    head.fit_start(world.samples())
    assert same(weights(head), before)


def test_the_same_seed_and_rows_give_the_same_start():
    found = []
    for _ in range(2):
        world = World(False)
        head = world.head()
        head.fit_start(world.samples())
        found.append(weights(head))
    assert same(*found)


def test_padding_and_other_documents_are_not_read():
    world = World(True)
    samples = world.samples(12)
    apart = world.head()
    apart.fit_start(samples)
    rows = []
    for a, b in zip(samples[::2], samples[1::2], strict=True):
        padding = DraftBatch(torch.randn_like(a.features_BTF), a.tokens_BTJ * 0, a.positions_BT * 0, a.documents_BT - 1, a.valid_BTJ & False)
        b.documents_BT += 1
        rows.append(DraftBatch(*(torch.cat([getattr(x, name) for x in (a, b, padding)], 1) for name in vars(a))))
    packed = world.head()
    packed.fit_start(rows)
    for name, value in apart.named_parameters():
        assert torch.allclose(value, packed.get_parameter(name), atol=1e-5), name


def test_no_more_rows_are_read_than_needed(monkeypatch):
    monkeypatch.setattr("draftheads.heads.eagle3.slots_wanted", lambda hidden: 200)
    world, read = World(True), []
    world.head().fit_start(read.append(batch) or batch for batch in world.samples())
    assert len(read) == 3  # of 91 slots each


@pytest.mark.parametrize("mutant", ["token fed instead of the token at the slot", "lm_head in the embedding's space", "fast rotary dimensions"])
def test_mutants_do_not_copy(mutant, monkeypatch):
    world = World(tied=False)
    head, samples = world.head(), world.samples()
    if mutant.startswith("token"):
        for batch in samples:
            batch.tokens_BTJ = batch.tokens_BTJ.roll(-1, 1)
    elif mutant.startswith("lm_head"):
        monkeypatch.setattr(induction, "_procrustes", lambda x, y: torch.eye(H, dtype=torch.float64))
    else:
        real = induction.induction_init
        monkeypatch.setattr("draftheads.heads.eagle3.induction_init", lambda a, fc, inv_freq, *rest: real(a, fc, inv_freq * 0, *rest))
        head._rotary[0].inv_freq.fill_(0.1)  # half a turn, and more, at the distance of the copies
    head.fit_start(samples)
    assert min(world.copied(head)) < 0.3


def test_tied_embeddings_need_no_rotation():
    embed_UH = torch.randn(V, H)
    found_HH = induction._procrustes(embed_UH, embed_UH * 3)
    assert torch.allclose(found_HH, torch.eye(H, dtype=torch.float64), atol=1e-6)


def test_one_short_row_and_a_dead_tap_are_no_trouble():
    world = World(False)
    head, (batch,) = world.head(), world.samples(1)
    rest = (batch.tokens_BTJ, batch.positions_BT, batch.documents_BT, batch.valid_BTJ)
    head.fit_start([DraftBatch(torch.zeros_like(batch.features_BTF[:, :2]), *(x[:, :2] for x in rest))])
    assert all(p.isfinite().all() for p in head.parameters())


def test_a_head_wider_than_the_hidden_state_starts_random():
    world = World(True, head_dim=512)
    head = world.head()
    before = weights(head)
    head.fit_start(world.samples())
    assert same(weights(head), before)
