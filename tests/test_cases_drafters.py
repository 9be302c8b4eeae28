"""Public cases 8, 9 and 10 for every drafter and every tree it can grow, through decode(): whatever drafts, the output is the target's.

How good a draft is, is up to the test: drafters that copy are shown a text beforehand, the logits of the others are bent towards the target's
next token or away from it. References: transformers' generate (case 8), exact probabilities (case 9), the autoregressive loop (case 10).

Shape suffixes: B rows, W nodes of a level, U draft vocabulary, V vocabulary, L tokens of an answer, X prefixes.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_decode import check_counts
from test_heads import make_head
from test_mtp import GLM, MELLUM, needs_mtp, randomised
from torch import Tensor

import tiny
from draftheads.inference import step
from draftheads.inference.decode import complete
from draftheads.inference.drafters import draft_model, pairs
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.draft_model import DraftModelDrafter
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.mtp import MtpDrafter
from draftheads.inference.drafters.ngram import NgramDrafter, NgramIndex
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.drafters.suffix import SuffixDrafter
from draftheads.inference.growth import grow
from draftheads.inference.requests import Completion, Limits, Request, Sampling
from draftheads.inference.rows import Row
from draftheads.inference.shapes import Dynamic, Sampled, Shape, Static
from draftheads.inference.target import Target
from draftheads.inference.verify import Verdict, verify

SHAPES: dict[str, Shape | None] = {
    "chain": None, "static": Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))), "dynamic": Dynamic(4, 3, 12),
    "sampled": Sampled((2, 2, 1, 1))}
GROWN = ["draft_model", "head", "mtp", "ngram+head", "suffix+draft_model", "ngram+mtp"]
ALL = [("none", "chain"), ("ngram", "chain"), ("suffix", "chain"), ("suffix", "dynamic"), *((name, shape) for name in GROWN for shape in SHAPES)]
Right = Callable[[int], bool]  # position of a token, the prompt's included -> is it drafted rightly?
RIGHT: dict[str, Right] = {"bad": lambda i: False, "half": lambda i: i % 4 < 2, "good": lambda i: True}
Texts = dict[int, tuple[tuple[int, ...], list[int]]]  # of every request's seed the prompt and the target's answer


def combinations(*pairs_: tuple[str, str]) -> list[Any]:
    return [pytest.param(name, shape, id=f"{name}-{shape}", marks=[needs_mtp] if "mtp" in name else []) for name, shape in pairs_]


@functools.lru_cache
def target(kind: str, mtp: bool) -> Target:
    """"window": 8 in every second layer. "small": 8 tokens, of which few are all but certain. "plain": neither. With MTP layers if `mtp`, in which
    case it is another family."""
    two = dict(num_hidden_layers=2, seed=1)
    if kind == "window":
        changes = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
        model = tiny.model("mellum", **MELLUM | two | changes) if mtp else tiny.model("gemma3_text", **two | changes)
    else:
        changes = dict(vocab_size=8) if kind == "small" else {}
        model = tiny.model("glm4_moe", num_mtp_layers=2, **GLM | two | changes) if mtp else tiny.model("llama", **two | changes)
    if kind == "small":
        with torch.no_grad():
            model.lm_head.weight *= 0.4
    return Target.from_model(model, tiny.tokenizer(), name=f"{kind}{' with MTP' if mtp else ''}")


@functools.lru_cache
def small_model(vocab: int, positions: int) -> Target:
    model = tiny.model(num_hidden_layers=1, seed=7, vocab_size=vocab, max_position_embeddings=positions)
    return Target.from_model(model, tiny.tokenizer(), name="draft")


@functools.lru_cache
def mtp_layers(kind: str) -> Any:
    from transformers.modeling_layers import MtpModel

    layers = MtpModel(target(kind, True).model, 1 if kind == "window" else 2)
    randomised(layers.layers, 3)
    return layers.eval()


@functools.lru_cache
def head(kind: str, positions: int) -> Any:
    base = target(kind, False)
    return make_head(geo=base.geometry, taps=[0, 1], draft_ids=torch.arange(base.geometry.vocab_size), max_positions=positions)[0]


class Shown(NgramDrafter):
    """Every row's text begins with one that somebody else wrote."""

    def __init__(self, before: dict[tuple[int, ...], list[int]], prompt_lookup_min: int) -> None:
        super().__init__(prompt_lookup_min, 5)
        self.before = before

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        prompt = prompt_T.tolist()
        self.rows[row] = NgramIndex([*self.before.get(tuple(prompt), []), *prompt, root], self.prompt_lookup_min, self.prompt_lookup_max)


def drafter(name: str, kind: str, texts: Texts | None = None, right: Right = RIGHT["good"], positions: int = 512) -> tuple[Target, Drafter]:
    """The target and the drafter of that name; what copies is shown each answer, wrong where `right` says so."""
    base = target(kind, "mtp" in name)
    found: list[Drafter] = []
    for part in name.split("+"):
        shown = {p: [t if right(len(p) + i) else (t + 1) % 128 for i, t in enumerate(answer)] for p, answer in (texts or {}).values()}
        if part == "none":
            found.append(NoDrafter())
        elif part == "ngram":
            found.append(Shown({p: [*p, *answer] for p, answer in shown.items()} if name == "ngram" else {}, 1 if name == "ngram" else 2))
        elif part == "suffix":
            found.append(SuffixDrafter(max_spec_factor=8.0, min_score=0.0 if name == "suffix" else 1.5))
            for p, answer in shown.items() if name == "suffix" else ():
                found[-1].remember(p, answer)  # type: ignore[attr-defined]
        elif part == "draft_model":
            found.append(DraftModelDrafter(small_model(base.geometry.vocab_size, positions), base))
        elif part == "head":
            found.append(HeadDrafter(head(kind, positions), base))
        else:
            found.append(MtpDrafter(base, mtp_layers(kind)))
            found[-1].max_positions = min(positions, 512)  # type: ignore[attr-defined]  # such layers have the target's positions: set by hand
    return base, found[0] if len(found) == 1 else Composite(*found)


class Bent:
    """A stepper whose logits are bent: after a path of right tokens the right next one is certain where `right` says so, elsewhere impossible."""

    def __init__(self, inner: Any, texts: list[list[int]], roots: list[int], ids: list[int], right: Right) -> None:
        self.inner, self.texts, self.roots, self.ids, self.right = inner, texts, roots, ids, right

    def begin(self, depth: int) -> Tensor:
        self.on, self.depth = [[True] for _ in self.roots], 1
        return self._bend(self.inner.begin(depth)[:, None])[:, 0]

    def step(self, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        self.on = [[on[p] and t == self._next(b) for t, p in zip(tokens, parents, strict=True)]
                   for b, (on, tokens, parents) in enumerate(zip(self.on, tokens_BW.tolist(), parents_BW.tolist(), strict=True))]
        self.depth += 1
        return self._bend(self.inner.step(tokens_BW, parents_BW))

    def _next(self, b: int) -> int | None:
        at = self.roots[b] + self.depth
        return self.texts[b][at] if at < len(self.texts[b]) else None

    def _bend(self, logits_BWU: Tensor) -> Tensor:
        logits_BWU = logits_BWU.clone()
        for b, on in enumerate(self.on):
            if self._next(b) in self.ids:
                column = self.ids.index(self._next(b))  # type: ignore[arg-type]
                for w in range(len(on)):
                    if on[w]:
                        logits_BWU[b, w, column] = 1e4 if self.right(self.roots[b] + self.depth) else -1e4
        return logits_BWU


def decoded(name: str, shape: str, kind: str, asked: list[Request], texts: Texts, quality: str, batch_size: int, limits: Limits, positions: int = 512,
            eos: frozenset[int] = frozenset()) -> list[Completion]:
    base, made = drafter(name, kind, texts, RIGHT[quality], positions)
    base = copy.copy(base)
    base.eos_ids = eos

    def bent(stepper: Any, root_B: Tensor, plan: Plan, caps: Any, rows: Any, noise: Any, roots_B: Tensor, vocab: Any, *rest: Any) -> Any:
        whole = [[*p, *answer] for p, answer in (texts[seed] for seed in noise.seeds_B.tolist())]
        stepper = Bent(stepper, whole, roots_B.tolist(), vocab.ids_U.tolist(), RIGHT[quality])
        return grow(stepper, root_B, plan, caps, rows, noise, roots_B, vocab, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "grow", bent)
        patch.setattr(draft_model, "grow", bent)
        return complete(base, made, asked, limits=limits, batch_size=batch_size, plan=Plan(4, tree=SHAPES[shape]))


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(4, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def stats(done: Completion, room: int = 1) -> list[tuple[int, int, int]]:
    """Of the rounds that began with room for so many tokens or more."""
    left = [len(done.tokens) - 1 - sum(r.emitted for r in done.rounds[:i]) for i in range(len(done.rounds))]
    return [(r.drafted, r.accepted, r.emitted) for r, n in zip(done.rounds, left, strict=True) if n >= room]


# ---- case 8: greedy equality, a window, rows of unequal length


@functools.lru_cache
def windowed(mtp: bool) -> tuple[list[Request], Texts]:
    """Prompts of 20, 5 and 11 tokens, the last of which ends early; answers by transformers."""
    base = target("window", mtp)
    asked = [Request(f"{n}", prompt(n, n), seed=n, max_new_tokens=new) for n, new in ((20, 40), (5, 12), (11, 4))]
    texts: Texts = {}
    for request in asked:
        ids = torch.tensor([request.prompt_ids])
        out = base.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=None,
                                  pad_token_id=3)
        texts[request.seed] = (request.prompt_ids, out[0, ids.shape[1] :].tolist())
    return asked, texts


def check_greedy(name: str, shape: str) -> None:
    asked, texts = windowed("mtp" in name)
    shorter, short = ([replace(r, max_new_tokens=min(most, r.max_new_tokens or 0)) for r in asked] for most in (12, 5))
    apart: list[Any] = []
    for quality, batch_size, wanted in (("bad", 1, short[2:]), ("bad", 3, short), ("half", 1, shorter), ("half", 3, asked)):
        if quality == "bad" and "+" in name:
            continue  # copies may be right all the same, and behind them it is one of the other drafters
        found = decoded(name, shape, "window", wanted, texts, quality, batch_size, Limits(64, 128))
        for request, done in zip(wanted, found, strict=True):
            assert done.tokens == texts[request.seed][1][: request.max_new_tokens], (quality, batch_size, request.id)
            check_counts(done)
            if name == "none":
                assert all(r.drafted == r.accepted == 0 for r in done.rounds)
        rounds = [r for done in found for r in done.rounds]
        if name in ("draft_model", "head", "mtp") and quality == "bad":
            assert not any(r.accepted for r in rounds) and any(r.drafted for r in rounds)
        elif name != "none" and quality == "half":
            assert any(r.accepted for r in found[0].rounds) and any(r.accepted < r.drafted for r in found[0].rounds)
            apart.append([stats(done, 5) for done in found])
    # What a row drafts is its own business, but for a store that rows share and for a tree as deep as the deepest row has room.
    if apart and "suffix" not in name and shape != "dynamic":
        assert apart[0][0] and all(few == many[: len(few)] for few, many in zip(*apart, strict=True))


@pytest.mark.parametrize(("name", "shape"), combinations(*ALL))
def test_case_8_greedy_equality(name: str, shape: str) -> None:
    check_greedy(name, shape)


# ---- case 9: draws

SMALL, START, L, DRAWS, HOT = 8, (5, 0, 6, 4), 3, 250, Sampling(0.7)


@functools.lru_cache
def exact(mtp: bool) -> list[Tensor]:
    """p [X, V] of the next token after all X = 8, 64 prefixes of 1, 2 tokens, in the order of their digits."""
    found = []
    for length in range(1, L):
        prefixes_XL = torch.cartesian_prod(*[torch.arange(SMALL)] * length).view(-1, length)
        with torch.no_grad():
            logits_XV = target("small", mtp).model(torch.cat([torch.tensor(START).expand(len(prefixes_XL), -1), prefixes_XL], 1)).logits[:, -1]
        found.append((logits_XV.double() / HOT.temperature).softmax(-1))
    return found


def chi_square(answers: list[list[int]], mtp: bool) -> float:
    """p-value of the second and third token given all before them; cells expected below 5 are pooled per prefix."""
    key_B, statistic, freedom = torch.tensor([a[0] for a in answers]), 0.0, 0
    for length, p_XV in enumerate(exact(mtp), 1):
        token_B = torch.tensor([a[length] for a in answers])
        seen_XV = torch.bincount(key_B * SMALL + token_B, minlength=len(p_XV) * SMALL).view(-1, SMALL).double()
        for seen_V, p_V in zip(seen_XV, p_XV, strict=True):
            expected_V = p_V * seen_V.sum()
            big_V = expected_V >= 5
            cells = [*zip(seen_V[big_V].tolist(), expected_V[big_V].tolist(), strict=True)]
            cells += [(s, e) for s, e in [(float(seen_V[~big_V].sum()), float(expected_V[~big_V].sum()))] if e >= 5]
            scale = sum(s for s, _ in cells) / max(1e-9, sum(e for _, e in cells))
            statistic += sum((s - e * scale) ** 2 / (e * scale) for s, e in cells if scale > 0)
            freedom += max(0, len(cells) - 1)
        key_B = key_B * SMALL + token_B
    if freedom < 15:
        raise ValueError(f"{freedom} degrees of freedom tell nothing")
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def drawn(name: str, shape: str, batch_size: int, draws: int) -> list[Completion]:
    base, made = drafter(name, "small")
    asked = [Request(str(i), START, seed=i) for i in range(draws)]
    return complete(base, made, asked, HOT, Limits(L + 2, 32, ignore_eos=True), batch_size=batch_size, plan=Plan(3, tree=SHAPES[shape]))


@functools.lru_cache
def alone(mtp: bool) -> list[list[int]]:
    base = target("small", mtp)
    asked = [Request(str(i), START, seed=i) for i in range(DRAWS)]
    return [c.tokens for c in complete(base, NoDrafter(), asked, HOT, Limits(L + 2, 32, ignore_eos=True), batch_size=DRAWS)]


def check_draws(name: str, shape: str) -> None:
    """Drafts that are drawn: many answers, by chi-square. Likeliest drafts and copies: the very answers that there are without drafts, of which
    the chi-square is taken once. A few of them again in small batches."""
    mtp, likeliest = "mtp" in name, name in ("none", "ngram", "suffix") or shape in ("static", "dynamic")
    found = drawn(name, shape, DRAWS, 30 if likeliest else DRAWS)
    tokens = [c.tokens for c in found]
    assert chi_square(alone(mtp) if likeliest else tokens, mtp) > 1e-4
    if likeliest:
        assert tokens == alone(mtp)[:30]
    if name != "none":
        rounds = [r for c in found for r in c.rounds]
        assert any(r.accepted for r in rounds) and any(r.accepted < r.drafted for r in rounds)
        assert likeliest or {r.source for r in rounds} >= set(name.split("+"))
    for batch_size, few in ((1, 2), (3, 5)) if likeliest or "suffix" not in name else ():  # its store makes other drafts, so other draws
        assert [c.tokens for c in drawn(name, shape, batch_size, few)] == tokens[:few], batch_size


@pytest.mark.parametrize(("name", "shape"), combinations(*ALL))
def test_case_9_draws_are_the_targets(name: str, shape: str) -> None:
    check_draws(name, shape)


# ---- case 10: ends and limits


@functools.lru_cache
def ended(mtp: bool) -> tuple[list[Request], Texts, frozenset[int]]:
    """An end token and 6 prompts whose answers have it first at place 0 (of the prefill), 1 … 4 (of a block of 4) and 5 (behind it)."""
    asked = [Request(str(i), prompt(6, i), seed=i) for i in range(300)]
    answers = [c.tokens for c in complete(target("plain", mtp), NoDrafter(), asked, limits=Limits(14, 64, ignore_eos=True), batch_size=300)]
    for eos in range(128):
        first = {a.index(eos): i for i, a in reversed([*enumerate(answers)]) if eos in a[:6]}
        if len(first) == 6:
            chosen = [first[place] for place in range(6)]
            return [asked[i] for i in chosen], {i: (asked[i].prompt_ids, answers[i]) for i in chosen}, frozenset({eos})
    raise AssertionError("no token ends answers at all places")


def check_ends(name: str, shape: str, batch_size: int) -> None:
    asked, texts, eos = ended("mtp" in name)
    found = decoded(name, shape, "plain", asked, texts, "good", batch_size, Limits(14, 64), eos=eos)
    for place, (request, done) in enumerate(zip(asked, found, strict=True)):
        assert done.tokens == texts[request.seed][1][: place + 1] and done.finish_reason == "eos"
        check_counts(done)
        if name in ("draft_model", "head", "mtp"):  # all of the block is right, also behind the end
            assert stats(done) == ([] if place == 0 else [(4, 4, min(place, 5))])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("name", "shape"), combinations(*ALL))
def test_case_10_an_end_at_each_place_of_a_block(name: str, shape: str, batch_size: int) -> None:
    check_ends(name, shape, batch_size)


@functools.lru_cache
def plain_texts(mtp: bool, *lengths: int) -> tuple[list[Request], Texts]:
    asked = [Request(str(n), prompt(n, n), seed=n) for n in lengths]
    found = complete(target("plain", mtp), NoDrafter(), asked, limits=Limits(24, 128, ignore_eos=True))
    return asked, {r.seed: (r.prompt_ids, c.tokens) for r, c in zip(asked, found, strict=True)}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("name", "shape"), combinations(*ALL))
def test_case_10_answers_of_1_and_2_tokens_and_prompts_at_the_limit(name: str, shape: str, batch_size: int) -> None:
    """Beside each other: 1 token, 2, 3, a prompt at the limit, and one that leaves 4 tokens before it."""
    asked, texts = plain_texts("mtp" in name, 7, 9, 5, 48, 44)
    wanted = [replace(r, max_new_tokens=new) for r, new in zip(asked, (1, 2, 3, 9, 9), strict=True)]
    found = decoded(name, shape, "plain", wanted, texts, "good", batch_size, Limits(99, 48))
    assert found[3].finish_reason == "error" and not found[3].tokens and not found[3].rounds
    assert "its prompt has 48 tokens, which leaves no room for an answer: max_len is 48" in (found[3].error or "")
    for done, new in zip([*found[:3], found[4]], (1, 2, 3, 4), strict=True):
        assert done.tokens == texts[done.request.seed][1][:new] and done.finish_reason == "length"
        check_counts(done)
        assert all(r.drafted <= max(0, new - 2) for r in done.rounds)
        assert name not in ("draft_model", "head", "mtp") or len(done.rounds) == (new > 1)


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize(("name", "shape"), combinations(*ALL))
def test_case_10_nobody_is_asked_for_drafts_that_cannot_be_used(name: str, shape: str, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, texts = plain_texts("mtp" in name, 7, 9, 5, 48, 44)
    base, made = drafter(name, "plain", texts)
    monkeypatch.setattr(made, "propose", lambda *arguments: pytest.fail("asked"))
    found = complete(base, made, asked[:3], limits=Limits(new, 48, ignore_eos=True), batch_size=3, plan=Plan(4, tree=SHAPES[shape]))
    assert [c.tokens for c in found] == [texts[r.seed][1][:new] for r in asked[:3]]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("name", "shape"), combinations(*((name, shape) for name in GROWN for shape in SHAPES)))
def test_case_10_a_draft_with_fewer_positions(name: str, shape: str, batch_size: int) -> None:
    """Draft 32 positions, target 128 and more: a prompt of 48; 28 + 20 new tokens, which cross inside a block; 31, which cross in the first."""
    asked, texts = plain_texts("mtp" in name, 48, 28, 31)
    wanted = [replace(r, max_new_tokens=new) for r, new in zip(asked, (3, 20, 6), strict=True)][:1 + batch_size]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = decoded(name, shape, "plain", wanted, texts, "good", batch_size, Limits(24, 128), positions=32)
    assert len([w for w in caught if "position 32" in str(w.message)]) == 1
    for request, done in zip(wanted, found, strict=True):
        assert done.tokens == texts[request.seed][1][: request.max_new_tokens]
        check_counts(done)
        known = len(request.prompt_ids) + 1
        for r in done.rounds:
            if r.source not in ("ngram", "suffix"):  # the last draft is not fed; a head is fed pairs, of which there is one fewer than tokens
                fed = 32 - known + (1 if "draft_model" in name else 2)
                assert r.drafted == r.accepted == max(0, min(4, fed, len(request.prompt_ids) + len(done.tokens) - known - 1))
            known += r.emitted


# ---- mutants: what these cases say to a broken library


def one_too_many(tree: Any, *arguments: Any) -> Verdict:
    """Where drafts were left over, the last accepted one's first child is accepted too."""
    verdict = verify(tree, *arguments)
    path_BM, counts_B = verdict.path_BM.clone(), verdict.counts_B.clone()
    for b, count in enumerate(counts_B.tolist()):
        at = int(path_BM[b, count])
        below = [i for i in range(1, tree.width) if tree.parents_BN[b, i] == at and tree.valid_BN[b, i]]
        if below:
            path_BM[b, count + 1], counts_B[b] = below[0], count + 1
    return replace(verdict, path_BM=path_BM, counts_B=counts_B)


@pytest.mark.parametrize(("name", "shape"), combinations(("draft_model", "chain"), ("head", "static"), ("mtp", "sampled")))
@pytest.mark.parametrize("check", [check_greedy, check_draws])
def test_one_accepted_token_too_many_is_noticed(check: Any, name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windowed("mtp" in name), exact("mtp" in name)  # references by the whole library
    monkeypatch.setattr(step, "verify", one_too_many)
    with pytest.raises(AssertionError):
        check(name, shape)


@pytest.mark.parametrize(("name", "shape"), combinations(("ngram", "chain"), ("head", "dynamic"), ("suffix+draft_model", "sampled")))
def test_tokens_behind_the_end_are_noticed(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended("mtp" in name)
    whole = Row.add

    def untrimmed(self: Row, block: list[int], eos_ids: Any, stops: Any) -> list[int]:
        kept = whole(self, block, (), stops)
        self.finish_reason = "eos" if set(kept) & set(eos_ids) else self.finish_reason
        return kept

    monkeypatch.setattr(Row, "add", untrimmed)
    with pytest.raises(AssertionError):
        check_ends(name, shape, 3)
