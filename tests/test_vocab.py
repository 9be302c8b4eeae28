"""The reduced draft vocabulary: size, order, required and forbidden ids, ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.heads.vocab import build_draft_vocab, draft_maps, vocab_hash
from draftheads.recipes.schema import RecipeError


def test_more_slots_than_distinct_tokens():
    """draft_vocab_size 64, 20 tokens in the answers, 100 in the target: 64 different valid ids, the 20 seen ones among them."""
    counts_V = torch.zeros(100, dtype=torch.long)
    seen = torch.arange(37, 97, 3)
    counts_V[seen] = torch.arange(20) % 3 + 1
    ids_U = build_draft_vocab(counts_V, 64, required=[99])
    assert ids_U.dtype == torch.int64
    assert len(set(ids_U.tolist())) == 64
    assert ids_U.tolist() == sorted(ids_U.tolist())
    assert ids_U.max() < 100
    assert set(seen.tolist()) | {99} <= set(ids_U.tolist())
    # The rest is the prior's: low ids first.
    unseen = [i for i in range(100) if i not in set(seen.tolist()) | {99}]
    assert set(ids_U.tolist()) == set(seen.tolist()) | {99} | set(unseen[: 64 - 21])


def test_frequent_tokens_win_and_required_ones_stay():
    counts_V = torch.zeros(50, dtype=torch.long)
    counts_V[40:50] = torch.arange(10, 110, 10)
    assert build_draft_vocab(counts_V, 4).tolist() == [46, 47, 48, 49]
    assert build_draft_vocab(counts_V, 4, required=[2, 40]).tolist() == [2, 40, 48, 49]
    assert build_draft_vocab(counts_V, 4, forbidden=range(48, 50)).tolist() == [44, 45, 46, 47]


def test_a_prior_of_counts_ranks_the_tail():
    counts_V, prior_V = torch.zeros(50), torch.zeros(50)
    counts_V[10], prior_V[30], prior_V[20] = 5, 7, 3
    assert build_draft_vocab(counts_V, 3, prior_V=prior_V).tolist() == [10, 20, 30]
    # No counts, no prior mass: the lower ids.
    assert build_draft_vocab(torch.zeros(50), 3, prior_V=torch.zeros(50)).tolist() == [0, 1, 2]


def test_padding_rows_of_the_lm_head_are_never_in():
    counts_V = torch.zeros(128, dtype=torch.long)
    counts_V[120] = 1000  # cannot happen; would still be refused
    assert build_draft_vocab(counts_V, 100, forbidden=range(100, 128)).tolist() == list(range(100))
    with pytest.raises(RecipeError, match="101 exceeds the 100 usable"):
        build_draft_vocab(counts_V, 101, forbidden=range(100, 128))


def test_errors_name_what_to_change():
    counts_V = torch.zeros(10)
    for arguments, words in [
        (dict(size=11), "11 exceeds the 10"),
        (dict(size=1, required=[1, 2]), "smaller than the 2"),
        (dict(size=3, required=[1], forbidden=[1]), "both required and forbidden"),
        (dict(size=3, required=[10]), "outside"),
        (dict(size=3, forbidden=[-1]), "outside"),
    ]:
        with pytest.raises(RecipeError, match=words):
            build_draft_vocab(counts_V, **arguments)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=40), st.data())
def test_any_vocabulary_is_exact(counts, data):
    V = len(counts)
    forbidden = set(data.draw(st.lists(st.integers(0, V - 1), max_size=V // 3)))
    required = set(data.draw(st.lists(st.integers(0, V - 1), max_size=3))) - forbidden
    size = data.draw(st.integers(max(1, len(required)), V - len(forbidden)))
    counts_V = torch.tensor(counts)
    ids_U = build_draft_vocab(counts_V, size, required=required, forbidden=forbidden)
    ids = set(ids_U.tolist())
    assert len(ids) == len(ids_U) == size
    assert ids_U.tolist() == sorted(ids)
    assert required <= ids
    assert not forbidden & ids
    free = size - len(required)
    rest = sorted((c for i, c in enumerate(counts) if i not in required | forbidden), reverse=True)
    chosen = sorted((counts[i] for i in ids - required), reverse=True)
    seen = sum(c > 0 for c in rest)
    assert sum(c > 0 for c in chosen) == min(free, seen) or seen > size
    assert torch.equal(ids_U, build_draft_vocab(counts_V, size, required=sorted(required, reverse=True), forbidden=forbidden))
    d2t_U, t2d_V = draft_maps(ids_U, V)
    assert torch.equal(torch.arange(size) + d2t_U, ids_U)
    assert torch.equal(t2d_V.nonzero()[:, 0], ids_U)
    assert vocab_hash(ids_U) == vocab_hash(ids_U.to(torch.int32))
