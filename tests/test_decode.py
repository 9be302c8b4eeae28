"""decode(): whatever is drafted, whatever the batch, the output is the target's own, and nothing after its end is counted.

Stub drafters replay the target's own answer with errors at chosen places, as a chain or inside a bushy tree. The autoregressive path is
compared with transformers' generate for every family; everything else is compared with the autoregressive path.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from draftheads.heads.tree import DraftTree
from draftheads.inference import metrics
from draftheads.inference.cache import SlotCache
from draftheads.inference.decode import complete, decode
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Completion, Limits, Request, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

Wrong = Callable[[int, int], bool]  # (length of the prompt, index of the token in the answer) -> replay it wrongly


class Replay(Drafter):
    """Proposes the answer it was given, with errors. shape "chain"; "tree": the answer among wrong siblings, in a shuffled layout.

    Records what it was shown: `seen[prompt]` is the row's tokens, features[prompt] one tensor a call.
    """

    name = "replay"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], wrong: Wrong = lambda n, i: False, shape: str = "chain",
                 taps: tuple[int | str, ...] = ()) -> None:
        self.answers, self.wrong, self.shape, self.taps = answers, wrong, shape, taps
        self.asked = 0
        self.seen: dict[tuple[int, ...], list[int]] = {}
        self.features: dict[tuple[int, ...], list[Tensor]] = {}

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        self.rows: list[tuple[int, ...]] = [()] * batch

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        prompt = tuple(prompt_T.tolist())
        self.rows[row], self.seen[prompt] = prompt, [root]
        if features_TF is not None:
            self.features[prompt] = [features_TF]

    def move(self, source: int, to: int) -> None:
        self.rows[to] = self.rows[source]

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        for b, count in enumerate(counts_B.tolist()):
            self.seen[self.rows[b]] += tokens_BM[b, :count].tolist()
            if features_BMF is not None:
                self.features[self.rows[b]].append(features_BMF[b, :count])

    def propose(self, plan: Plan, sampling: Any, noise: Any) -> DraftTree:
        self.asked += 1
        B = len(noise.seeds_B)
        chains = [self._chain(self.rows[b], min(plan.gamma, plan.room_B[b] if plan.room_B else plan.gamma)) for b in range(B)]
        root_B = torch.tensor([self.seen[self.rows[b]][-1] for b in range(B)])
        widest = max(map(len, chains))
        drafts_BG = torch.tensor([c + [0] * (widest - len(c)) for c in chains], dtype=torch.long).reshape(B, widest)
        tree = DraftTree.chain(root_B, drafts_BG, torch.tensor([len(c) for c in chains]))
        return tree if self.shape == "chain" else bushy(tree)

    def _chain(self, prompt: tuple[int, ...], length: int) -> list[int]:
        done = len(self.seen[prompt])
        answer = self.answers[prompt][done : done + length]
        return [(t + 1) % 128 if self.wrong(len(prompt), done + i) else t for i, t in enumerate(answer)]


def bushy(chain: DraftTree) -> DraftTree:
    """Before every node of the chain a wrong sibling, so that the path's nodes are not contiguous and the cache must be compacted."""
    B, N = chain.tokens_BN.shape
    tokens, parents, valid, last = [chain.tokens_BN[:, 0]], [-1], [chain.valid_BN[:, 0]], 0
    for i in range(1, N):
        tokens += [(chain.tokens_BN[:, i] + 64) % 128, chain.tokens_BN[:, i]]
        valid += [chain.valid_BN[:, i], chain.valid_BN[:, i]]
        parents += [last, last]
        last = len(parents) - 1
    return DraftTree(torch.stack(tokens, 1), torch.tensor(parents).expand(B, -1), torch.stack(valid, 1))


WRONG: dict[str, Wrong] = {
    "always right": lambda n, i: False,
    "never right": lambda n, i: True,
    "half right": lambda n, i: i % 2 == n % 2,
    "sometimes right": lambda n, i: (i * 7 + n * 3) % 5 == 0,
}


@functools.lru_cache
def target(family: str = "llama", **changes: Any) -> Target:
    return Target.from_model(tiny.model(family, **changes), tiny.tokenizer(), name=family)


def with_eos(base: Target, *eos: int) -> Target:
    other = copy.copy(base)
    other.eos_ids = frozenset(eos)
    return other


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(4, 100, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist())


@functools.cache
def plain(family: str, ids: tuple[int, ...], new: int = 40) -> list[int]:
    """The autoregressive greedy answer, without an end token."""
    (done,) = complete(target(family), NoDrafter(), [Request("0", ids)], limits=Limits(new, 256, ignore_eos=True))
    return done.tokens


def requests(*lengths: int, **options: Any) -> list[Request]:
    return [Request(str(i), prompt(n), seed=i, **options) for i, n in enumerate(lengths)]


def check_counts(done: Completion) -> None:
    assert sum(r.emitted for r in done.rounds) + 1 == len(done.tokens)  # the first token belongs to prefill
    assert all(0 <= r.accepted <= r.drafted <= r.nodes and 1 <= r.emitted <= r.accepted + 1 for r in done.rounds)
    assert all(r.emitted == r.accepted + 1 for r in done.rounds[:-1])


# ---- greedy equality


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_autoregressive_path_equals_transformers_generate(family: str) -> None:
    base = target(family)
    asked = requests(5, 11, 17)
    found = complete(with_eos(base, 2), NoDrafter(), asked, limits=Limits(24, 256), batch_size=2)
    drafted = complete(with_eos(base, 2), NgramDrafter(1, 3), asked, limits=Limits(24, 256), batch_size=2)
    for request, ours, copied in zip(asked, found, drafted, strict=True):
        ids = torch.tensor([request.prompt_ids])
        theirs = base.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=3)
        assert ours.tokens == copied.tokens == theirs[0, ids.shape[1] :].tolist()


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["llama", "gemma3_text"]), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6, unique=True),
    batch_size=st.integers(1, 4), gamma=st.integers(1, 5), wrong=st.sampled_from(list(WRONG)), shape=st.sampled_from(["chain", "tree"]),
    new=st.lists(st.integers(1, 24), min_size=6, max_size=6), eos=st.integers(0, 127),
)
def test_drafts_never_change_a_greedy_answer(family: str, lengths: list[int], batch_size: int, gamma: int, wrong: str, shape: str,
                                             new: list[int], eos: int) -> None:
    check_equality(family, lengths, batch_size, gamma, wrong, shape, new, eos)


def check_equality(family: str, lengths: list[int], batch_size: int, gamma: int, wrong: str, shape: str, new: list[int], eos: int) -> None:
    asked = [replace(r, max_new_tokens=n) for r, n in zip(requests(*lengths), new, strict=False)]
    answers = {r.prompt_ids: plain(family, r.prompt_ids) for r in asked}
    found = complete(with_eos(target(family), eos), Replay(answers, WRONG[wrong], shape), asked, limits=Limits(99, 128), batch_size=batch_size,
                     plan=Plan(gamma))
    for request, done in zip(asked, found, strict=True):
        expected = answers[request.prompt_ids][: request.max_new_tokens]
        reason = "length"
        if eos in expected:
            expected, reason = expected[: expected.index(eos) + 1], "eos"
        assert done.tokens == expected and done.finish_reason == reason
        check_counts(done)


HARD = dict(family="gemma3_text", lengths=[9, 3, 20, 14], batch_size=3, gamma=4, wrong="sometimes right", shape="tree", new=[24] * 6, eos=127)


def test_a_stale_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: accepted nodes are not moved to their slots."""
    check_equality(**HARD)
    monkeypatch.setattr(SlotCache, "commit", lambda self, rows, nodes, counts: self.advance(rows, counts))
    with pytest.raises(AssertionError):
        check_equality(**HARD)


def test_a_cache_that_keeps_rejected_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = HARD | {"shape": "chain"}
    check_equality(**case)
    advance = SlotCache.advance
    monkeypatch.setattr(SlotCache, "advance", lambda self, rows, counts: advance(self, rows, [c + 1 for c in counts]))
    with pytest.raises(AssertionError):
        check_equality(**case)


def test_wrong_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a tree's nodes get their index as position instead of their depth."""
    forward = Target.forward

    def shifted(self: Target, ids: Tensor, positions: Tensor, *rest: Any) -> Any:
        starts = rest[3]
        wide = 1 < ids.shape[1] and min(starts) > 0
        return forward(self, ids, positions[:, :1] + torch.arange(ids.shape[1]) if wide else positions, *rest)

    monkeypatch.setattr(Target, "forward", shifted)
    with pytest.raises(AssertionError):
        check_equality(**HARD)


def test_good_drafts_are_accepted_whole() -> None:
    asked = requests(6)
    stub = Replay({r.prompt_ids: plain("llama", r.prompt_ids) for r in asked})
    done = complete(target(), stub, asked, limits=Limits(25, 256, ignore_eos=True))[0]
    assert [r.accepted for r in done.rounds] == [4, 4, 4, 4, 3] and metrics.tau(done.rounds) == 24 / 5


def test_the_0_2_4_trace_comes_out_of_the_loop() -> None:
    """Answers 1 | 0+1 | 2+1 | 4+1: errors at 1, and at 4; rounds draft from 1, 2 and 5."""
    asked = requests(6)
    stub = Replay({r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}, lambda n, i: i in (1, 4))
    done = complete(target(), stub, asked, limits=Limits(30, 256, ignore_eos=True))[0]
    assert [r.accepted for r in done.rounds[:3]] == [0, 2, 4] and metrics.acceptance_rate(done.rounds[:3]) == 0.5


# ---- the end of an answer


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("at", range(11))
def test_end_token_at_every_place_of_the_block(at: int, shape: str) -> None:
    asked = requests(7)
    answer = plain("llama", asked[0].prompt_ids)
    eos = answer[at]
    expected = answer[: answer.index(eos) + 1]
    done = complete(with_eos(target(), eos), Replay({asked[0].prompt_ids: answer}, shape=shape), asked, limits=Limits(40, 256), plan=Plan(4))[0]
    assert done.tokens == expected and done.finish_reason == "eos"
    check_counts(done)
    ignored = complete(with_eos(target(), eos), NoDrafter(), asked, limits=Limits(11, 256, ignore_eos=True))[0]
    assert ignored.tokens == answer[:11]


@pytest.mark.parametrize("new", [1, 2, 3])
def test_short_answers_need_few_drafts(new: int) -> None:
    asked = requests(7, 4)
    stub = Replay({r.prompt_ids: plain("llama", r.prompt_ids) for r in asked})
    for batch_size in (1, 2):
        stub.asked, stub.seen = 0, {}
        for request, done in zip(asked, complete(target(), stub, asked, limits=Limits(new, 64, ignore_eos=True), batch_size=batch_size), strict=True):
            assert done.tokens == plain("llama", request.prompt_ids)[:new] and done.finish_reason == "length"
            assert all(r.drafted <= new - 2 for r in done.rounds)
        assert stub.asked == (0 if new < 3 else 2 // batch_size) and (new > 1 or not stub.seen)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_stop_strings_end_the_answer_inside_the_block(shape: str) -> None:
    asked = requests(7)
    answer = plain("llama", asked[0].prompt_ids)
    tokenizer = tiny.tokenizer()
    for at in range(2, 12):
        stop = tokenizer.decode(answer[at - 1 : at + 1])
        cut = next(i for i in range(1, 40) if stop in tokenizer.decode(answer[:i]))
        stub = Replay({asked[0].prompt_ids: answer}, shape=shape)
        done = complete(with_eos(target()), stub, asked, limits=Limits(40, 256, stop_strings=("\x00never", stop)))[0]
        assert done.tokens == answer[:cut] and done.finish_reason == "stop_string"
        check_counts(done)


def test_answers_end_at_the_last_position_of_cache_or_model() -> None:
    base = target("llama", max_position_embeddings=32)
    asked = requests(28, 5)
    answers = {r.prompt_ids: complete(base, NoDrafter(), [r], limits=Limits(99, 32, ignore_eos=True))[0].tokens for r in asked}
    assert [len(a) for a in answers.values()] == [4, 27]
    found = complete(base, Replay(answers), asked, limits=Limits(99, 4096, ignore_eos=True), batch_size=2, plan=Plan(8))
    assert [c.tokens for c in found] == list(answers.values()) and all(c.finish_reason == "length" for c in found)


def test_prompts_that_do_not_fit_fail_alone_and_say_why() -> None:
    asked = [*requests(5), Request("long", prompt(48)), Request("limit", prompt(32)), Request("empty", ()),
             Request("none", prompt(3), max_new_tokens=0), *[replace(r, id="last") for r in requests(6)]]
    found = complete(target(), NoDrafter(), asked, limits=Limits(4, 32, ignore_eos=True), batch_size=2)
    assert [c.finish_reason for c in found] == ["length", "error", "error", "error", "error", "length"]
    assert "48" in found[1].error and "32" in found[1].error and "32 tokens" in found[2].error and "no tokens" in found[3].error  # type: ignore[operator]
    assert all(not c.tokens and not c.rounds for c in found[1:5])
    assert [c.finish_reason for c in complete(target(), NoDrafter(), asked[1:2], limits=Limits(4, 32))] == ["error"]


def test_bad_calls_are_refused() -> None:
    with pytest.raises(RecipeError, match="ids must differ"):
        complete(target(), NoDrafter(), [Request("a", prompt(3)), Request("a", prompt(4))], limits=Limits(2, 32))
    with pytest.raises(RecipeError, match="batch_size"):
        list(decode(target(), NoDrafter(), [], batch_size=0))
    with pytest.raises(RecipeError, match="prompt_lookup_min"):
        NgramDrafter(3, 2)


# ---- rounds


def test_rounds_add_up_to_the_completions() -> None:
    asked = requests(5, 9, 3, 12, 7)
    stub = Replay({r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}, WRONG["half right"])
    written: dict[str, list[int]] = {}
    finished: list[Completion] = []
    queue = iter(asked)
    for r in decode(target(), stub, queue, limits=Limits(20, 128, ignore_eos=True), batch_size=3):
        for row, tokens in r.new_tokens.items():
            written.setdefault(row, []).extend(tokens)
            assert r.accepted[row] <= len(tokens)
        assert len(r.new_tokens) <= 3 and 0 <= r.t_draft + r.t_verify <= r.t_total
        if r.width == 0:
            assert sum(r.accepted.values()) == 0
        finished += r.finished
    assert {c.request.id: c.tokens for c in finished} == written and len(finished) == 5
    assert all(c.decode_s > 0 and c.prefill_s > 0 for c in finished)


def test_requests_are_read_no_further_than_there_are_slots() -> None:
    read: list[int] = []

    def source() -> Any:
        for i, request in enumerate(requests(4, 5, 6, 7, 8)):
            read.append(i)
            yield request

    next(iter(decode(target(), NoDrafter(), source(), limits=Limits(8, 64, ignore_eos=True), batch_size=2)))
    assert read == [0, 1]


def test_gradients_are_not_switched_off_for_the_caller() -> None:
    for _ in decode(target(), NoDrafter(), requests(4), limits=Limits(3, 64)):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# ---- sampling


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.2, top_k=20), Sampling(0.7, top_p=0.9)], ids=str)
def test_sampled_answers_with_deterministic_drafts_are_the_autoregressive_ones(sampling: Sampling) -> None:
    asked, limits = requests(5, 9, 3, 14), Limits(30, 128, ignore_eos=True)
    alone = [complete(target(), NoDrafter(), [r], sampling, limits)[0].tokens for r in asked]
    assert len({tuple(a) for a in alone}) == 4
    answers = dict(zip([r.prompt_ids for r in asked], alone, strict=True))
    for batch_size in (1, 3):
        for stub in (NoDrafter(), NgramDrafter(1, 4), Replay(answers, WRONG["sometimes right"]), Replay(answers, WRONG["half right"], "tree")):
            assert [c.tokens for c in complete(target(), stub, asked, sampling, limits, batch_size=batch_size)] == alone


def test_rows_have_their_own_temperature_and_seed() -> None:
    limits = Limits(20, 128, ignore_eos=True)
    cold, warm = requests(6)[0], replace(requests(6)[0], id="warm", temperature=0.9, seed=5)
    other = replace(warm, id="other", seed=6)
    found = complete(target(), NgramDrafter(1, 3), [cold, warm, other], Sampling(0.0), limits, batch_size=3)
    assert found[0].tokens == plain("llama", cold.prompt_ids)[:20]
    assert found[1].tokens == complete(target(), NoDrafter(), [warm], Sampling(0.0), limits)[0].tokens
    assert len({tuple(c.tokens) for c in found}) == 3


def test_the_certificate_sums_are_those_of_a_teacher_forced_pass() -> None:
    """The drafts are right, and the end comes in the middle of a block: what was accepted behind it must not count."""
    sampling, asked = Sampling(0.8, top_k=30), requests(5, 9)
    answers = {r.prompt_ids: complete(target(), NoDrafter(), [r], sampling, Limits(25, 128, ignore_eos=True))[0].tokens for r in asked}
    ends = [next(a[i] for i in range(12, 25) if a.index(a[i]) % 5 == 2) for a in answers.values()]
    found = complete(with_eos(target(), *ends), Replay(answers), asked, sampling, Limits(25, 128), batch_size=2, certificate=True)
    assert any(c.rounds[-1].emitted < c.rounds[-1].accepted + 1 for c in found)
    for request, done in zip(asked, found, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *done.tokens]])
        logits = target().model(ids).logits[0, len(request.prompt_ids) - 1 : -1].detach() / 0.8
        logp = logits.masked_fill(logits < logits.topk(30).values[:, -1:], -1e9).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        assert done.logprob_sum == pytest.approx(float(logp.gather(1, ids[0, len(request.prompt_ids) :, None]).sum()), abs=1e-3)
        assert done.entropy_sum == pytest.approx(float(entropy.sum()), abs=1e-3)
        assert done.variance_sum == pytest.approx(float((logp.exp() * (logp + entropy[:, None]) ** 2).sum()), abs=1e-3)
    limits = Limits(40, 128, ignore_eos=True)
    many = complete(target(), NgramDrafter(1, 3), requests(*range(3, 23)), sampling, limits, batch_size=10, certificate=True)
    assert abs(metrics.martingale_z(many)) < 4
    assert complete(target(), NoDrafter(), asked[:1], limits=Limits(3, 64), certificate=True)[0].variance_sum == 0


# ---- features: what drafters see, what distillation records


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafters_see_each_token_with_the_feature_before_it(shape: str) -> None:
    asked = requests(5, 11, 3, 8)
    stub = Replay({r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}, WRONG["sometimes right"], shape, taps=(1, 3, "final"))
    found = complete(target(), stub, asked, limits=Limits(22, 128, ignore_eos=True), batch_size=2)
    for request, done in zip(asked, found, strict=True):
        ids = [*request.prompt_ids, *done.tokens]
        assert stub.seen[request.prompt_ids][: len(done.tokens)] == done.tokens
        out = target().model(torch.tensor([ids]), output_hidden_states=True)
        expected = torch.cat([out.hidden_states[k][0] for k in (1, 3, -1)], -1)[: len(ids) - 1]
        torch.testing.assert_close(torch.cat(stub.features[request.prompt_ids])[: len(ids) - 1], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}])
def test_sampling_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="top_p above 0"):
        complete(target(), NoDrafter(), requests(5), Sampling(**({"temperature": 1.0} | wrong)))


def test_drafters_follow_rows_that_move() -> None:
    """The first slots end first and no request is left: the last rows move down, twice, and go on being drafted for."""
    asked = [replace(r, max_new_tokens=n) for r, n in zip(requests(5, 6, 7, 8), (4, 9, 30, 30), strict=True)]
    stub = Replay({r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}, taps=(2,))
    found = complete(target(), Composite(stub, NgramDrafter(1, 3)), asked, limits=Limits(99, 128, ignore_eos=True), batch_size=4)
    for request, done in zip(asked, found, strict=True):
        assert done.tokens == stub.seen[request.prompt_ids][: len(done.tokens)] == plain("llama", request.prompt_ids)[: request.max_new_tokens]
        assert all(r.accepted == r.drafted > 0 for r in done.rounds[:-1])


@pytest.mark.parametrize("stub", ["none", "chain", "tree"])
def test_captured_states_are_those_of_a_teacher_forced_pass(stub: str) -> None:
    asked = requests(5, 11, 3, 8, 6)
    answers = {r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}
    drafter = NoDrafter() if stub == "none" else Replay(answers, WRONG["half right"], stub, taps=("final", 2))
    eos = answers[asked[1].prompt_ids][9]
    found = complete(with_eos(target(), eos), drafter, asked, limits=Limits(17, 128), batch_size=3, capture_taps=(1, 2))
    assert len(found[1].tokens) <= 10
    for request, done in zip(asked, found, strict=True):
        out = target().model(torch.tensor([[*request.prompt_ids, *done.tokens]])[:, :-1], output_hidden_states=True)
        got = done.captured
        assert got is not None and got.final_TD.dtype == torch.float32 and not got.final_TD.is_inference()
        torch.testing.assert_close(got.features_TF, torch.cat([out.hidden_states[1][0], out.hidden_states[2][0]], -1), atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(got.final_TD, out.hidden_states[-1][0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(got.lse_T, out.logits[0].logsumexp(-1), atol=2e-4, rtol=1e-4)
    bare = complete(target(), NoDrafter(), asked[:1], limits=Limits(4, 64), capture_taps=())[0].captured
    assert bare is not None and bare.features_TF.shape[1] == 0 and bare.final_TD.shape[1] == 64
