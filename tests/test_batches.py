"""Batch planning: every row once, the same global batches for any world, limits kept, deterministic."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.data.batches import plan

lengths_of = st.lists(st.integers(1, 300), max_size=120)
sizes = st.integers(1, 2000)


def flat(batch):
    return sorted(row for rank in batch for micro in rank for row in micro)


@settings(max_examples=150, deadline=None)
@given(lengths_of, sizes, sizes, st.integers(0, 5), st.integers(0, 5), st.integers(1, 5))
def test_plan_keeps_its_promises(lengths, batch_tokens, micro_tokens, seed, epoch, world):
    options = dict(batch_tokens=batch_tokens, micro_tokens=micro_tokens, seed=seed, epoch=epoch)
    batches = plan(lengths, world=world, **options)
    assert sorted(row for batch in batches for row in flat(batch)) == list(range(len(lengths)))
    for batch in batches:
        rows = flat(batch)
        assert len(rows) == 1 or max(lengths[r] for r in rows) * len(rows) <= batch_tokens
        assert len(batch) == world
        assert len({len(rank) for rank in batch}) == 1
        for rank in batch:
            for micro in rank:
                assert len(micro) <= 1 or max(lengths[r] for r in micro) * len(micro) <= micro_tokens
    assert batches == plan(lengths, world=world, **options)
    assert [flat(b) for b in batches] == [flat(b) for b in plan(lengths, world=1, **options)]
    other_micro = plan(lengths, world=world, **(options | {"micro_tokens": micro_tokens + 7}))
    assert [flat(b) for b in batches] == [flat(b) for b in other_micro]


def test_epochs_and_seeds_shuffle_differently():
    lengths = [10 + i % 50 for i in range(200)]
    options = dict(batch_tokens=400, micro_tokens=200, world=1)
    plans = [plan(lengths, seed=s, epoch=e, **options) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert plans[0] != plans[1]
    assert plans[0] != plans[2]


def test_little_padding_and_full_batches():
    lengths = [50 + (i * 7919) % 400 for i in range(600)]
    batches = plan(lengths, batch_tokens=4096, micro_tokens=2048, seed=0, epoch=0, world=2)
    padded = sum(max(lengths[r] for r in micro) * len(micro) for b in batches for rank in b for micro in rank if micro)
    assert sum(lengths) / padded > 0.85
    assert len(batches) < 1.35 * sum(lengths) / 4096


def test_ranks_share_the_work():
    lengths = [100] * 64
    for batch in plan(lengths, batch_tokens=800, micro_tokens=800, seed=0, epoch=0, world=2):
        assert [sum(map(len, rank)) for rank in batch] == [4, 4]
