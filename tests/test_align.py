"""Alignment against a brute force that walks through drafting token by token; and the mutants that the peers ship must differ from it."""

from __future__ import annotations

import pytest
import torch

from draftheads.data.features import Row
from draftheads.train.align import align, loss_labels

F, D = 6, 4


def row(length: int, answers: list[tuple[int, int]], seed: int = 0, name: str = "r") -> Row:
    """Tokens are 10, 11, …; the feature at t starts with t, the final state with 100+t, lse is 1000+t: shifts show in the values."""
    g = torch.Generator().manual_seed(seed)
    flags = torch.zeros(length, dtype=torch.bool)
    for a, b in answers:
        flags[a:b] = True
    at = torch.arange(length - 1, dtype=torch.float32)
    features = torch.randn(length - 1, F, generator=g)
    features[:, 0] = at
    final = torch.randn(length - 1, D, generator=g)
    final[:, 0] = at + 100
    return Row(name, "chat", torch.arange(length) + 10, flags, features_TF=features, final_TD=final, lse_T=at + 1000)


ROWS = [
    row(12, [(5, 12)], 1),  # prompt, answer to the end
    row(9, [(3, 6)], 2),  # tokens after the answer (a template's newline)
    row(15, [(2, 5), (8, 15)], 3),  # two turns
    row(4, [(3, 4)], 4),  # an answer of one token: no slot at all
    row(7, [], 5),  # nothing supervised
    row(2, [(1, 2)], 6),
]


def brute(rows: list[Row], steps: int, supervise: str) -> dict[tuple[int, int, int], tuple[int, int, int, bool]]:
    """(row, slot, step) → (fed token, label, teacher position, metric slot), by drafting: after the pair (f_t, x_{t+1}) is known, step j
    feeds x_{t+1+j} and is asked for x_{t+2+j}; the target answers that question in its forward of x_{t+1+j}, whose state is t+1+j."""
    slots = {}
    for b, r in enumerate(rows):
        ids, flags = r.ids.tolist(), r.flags.tolist()
        states = len(ids) - 1
        for t in range(states):
            drafted_so_far = flags[t + 1]  # the root must be the target's own
            for j in range(steps):
                teacher = t + 1 + j
                if teacher >= states:
                    break
                drafted_so_far = drafted_so_far and flags[teacher + 1]
                if drafted_so_far or supervise == "all":
                    slots[b, t, j] = (ids[t + 1 + j], ids[teacher + 1], teacher, drafted_so_far)
    return slots


@pytest.mark.parametrize("supervise", ["answers", "all"])
@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_equals_brute_force(steps, supervise):
    got = align(ROWS, steps=steps, supervise=supervise, max_len=99)
    want = brute(ROWS, steps, supervise)
    B, T, J = got.batch.valid_BTJ.shape
    assert (B, T, J) == (len(ROWS), 14, steps)
    for b in range(B):
        for t in range(T):
            for j in range(J):
                assert bool(got.batch.valid_BTJ[b, t, j]) == ((b, t, j) in want), (b, t, j)
                if (b, t, j) not in want:
                    assert not got.answers_BTJ[b, t, j]
                    continue
                fed, label, teacher, metric = want[b, t, j]
                assert got.batch.tokens_BTJ[b, t, j] == fed
                assert got.labels_BTJ[b, t, j] == label
                assert bool(got.answers_BTJ[b, t, j]) == metric
                index = got.teacher_index_BTJ[b, t, j]
                assert got.final_BTD.flatten(0, 1)[index, 0] == 100 + teacher
                assert torch.equal(got.final_BTD.flatten(0, 1)[index], ROWS[b].final_TD[teacher])
                assert got.lse_BT.flatten()[index] == 1000 + teacher
                assert torch.equal(got.batch.features_BTF[b, t], ROWS[b].features_TF[t])


def test_first_draft_after_the_prompt_is_trained_and_nothing_past_the_end():
    """The slot at the last prompt token (its token is the answer's first) is what drafting meets first; peers' masks miss it."""
    got = align([ROWS[1]], steps=2, supervise="answers", max_len=99)  # answer = tokens 3, 4, 5 of 9
    assert got.batch.valid_BTJ[0, :, 0].nonzero().flatten().tolist() == [2, 3]  # (x_3 → x_4), (x_4 → x_5)
    assert got.batch.valid_BTJ[0, :, 1].nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("mutant", ["flag of the slot", "flag of the fed token", "flag of the label"])
def test_the_masks_of_the_peers_differ(mutant):
    """Off-by-one table: l_t; l_{t+1}; l_{t+2+j} alone. Each differs from the product on these rows, so the brute force can see them."""
    steps = 3
    want = brute(ROWS, steps, "answers")
    shift = {"flag of the slot": 0, "flag of the fed token": 1, "flag of the label": 2}[mutant]
    found = {(b, t, j) for b, r in enumerate(ROWS) for t in range(len(r) - 1) for j in range(steps)
             if t + 2 + j < len(r) and r.flags[t + shift + j]}
    assert found != set(want)


def test_padding_documents_and_positions():
    got = align(ROWS[:2], steps=2, supervise="all", max_len=99).batch
    assert got.documents_BT[0].tolist() == [0] * 11
    assert got.documents_BT[1].tolist() == [0] * 8 + [-1] * 3
    assert got.positions_BT[1].tolist() == list(range(11))
    assert not got.valid_BTJ[1, 7:].any()  # slot 7 pairs f_7 with the last token x_8: its label does not exist
    assert got.tokens_BTJ[1, 7].tolist() == [18, 0]
    assert got.features_BTF[1, 8:].abs().sum() == 0


def test_rows_do_not_see_each_other():
    """Alone or beside a longer row: the same slots, the same values."""
    alone = align([ROWS[1]], steps=3, supervise="answers", max_len=99)
    beside = align([ROWS[2], ROWS[1]], steps=3, supervise="answers", max_len=99)
    assert torch.equal(alone.batch.valid_BTJ[0], beside.batch.valid_BTJ[1, :8])
    assert not beside.batch.valid_BTJ[1, 8:].any()
    chosen = alone.batch.valid_BTJ[0]
    assert torch.equal(alone.labels_BTJ[0][chosen], beside.labels_BTJ[1, :8][chosen])


def test_answer_cut_off_entirely_and_in_the_middle():
    """Case 3: max_len 32, a prompt of 40 and another row cut inside its answer."""
    gone, cut = row(50, [(40, 50)], name="gone"), row(50, [(20, 50)], name="cut")
    got = align([gone, cut], steps=2, supervise="answers", max_len=32)
    assert got.batch.features_BTF.shape[:2] == (2, 31)
    assert not got.batch.valid_BTJ[0].any()
    assert got.batch.valid_BTJ[1, :, 0].nonzero().flatten().tolist() == list(range(19, 30))  # last label is x_31
    assert got.labels_BTJ[1, 29, 0] == 10 + 31
    assert torch.isfinite(got.final_BTD).all()
    assert len(loss_labels(gone.ids, gone.flags, supervise="answers", max_len=32)) == 0
    assert len(loss_labels(cut.ids, cut.flags, supervise="answers", max_len=32)) == 11


@pytest.mark.parametrize("supervise", ["answers", "all"])
def test_loss_labels_are_the_labels_of_step_0(supervise):
    for r in ROWS:
        got = align([r], steps=2, supervise=supervise, max_len=10)
        want = got.labels_BTJ[0, :, 0][got.batch.valid_BTJ[0, :, 0]]
        assert torch.equal(loss_labels(r.ids, r.flags, supervise=supervise, max_len=10), want)


def test_random_rows_against_brute_force():
    g = torch.Generator().manual_seed(0)
    for trial in range(30):
        rows = []
        for _ in range(3):
            length = int(torch.randint(2, 20, (1,), generator=g))
            r = row(length, [], trial)
            r.flags = torch.rand(length, generator=g) < 0.7
            rows.append(r)
        got = align(rows, steps=3, supervise="answers", max_len=99)
        assert {tuple(i) for i in got.batch.valid_BTJ.nonzero().tolist()} == set(brute(rows, 3, "answers"))


def test_rows_without_features_are_refused():
    r = row(5, [(2, 5)])
    r.final_TD = None
    with pytest.raises(ValueError, match="carry features"):
        align([r], steps=1, supervise="answers", max_len=9)
