"""MTP layers as a drafter: the logits are those of transformers' own MTP path, and the output stays the target's.

Targets: glm4_moe with 1 … 3 layers (in memory), mellum with one sliding layer (from a checkpoint, in transformers' own layout).
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from draftheads.inference import metrics
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.mtp import MtpDrafter, MtpLayers
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Completion, Limits, Request, Sampling
from draftheads.inference.shapes import Dynamic, Sampled, Shape, Static
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

modeling = pytest.importorskip("transformers.modeling_layers")
needs_mtp = pytest.mark.skipif(not hasattr(getattr(modeling, "MtpModel", None), "forward_layer"), reason="this transformers has no MtpModel")

GLM = dict(head_dim=16, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1)
MELLUM = dict(head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, num_mtp_layers=1, sliding_window=12,
              layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["sparse", "sparse"], num_hidden_layers=2)
BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)))
SHAPES: list[Shape | None] = [None, BUSHY, Dynamic(4, 3, 12), Sampled((2, 2, 1, 1))]


def randomised(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.2 if p.dim() >= 2 else 0.1) + (1.0 if p.dim() == 1 else 0.0))
    return module


@functools.lru_cache
def glm(K: int) -> tuple[Target, Any]:
    from transformers.modeling_layers import MtpModel

    target = Target.from_model(tiny.model("glm4_moe", num_hidden_layers=2, num_mtp_layers=K, **GLM), tiny.tokenizer(), name=f"glm-{K}")
    layers = MtpModel(target.model, K)
    randomised(layers.layers, K)
    return target, layers.eval()


def drafter(K: int) -> MtpDrafter:
    return MtpDrafter(*glm(K))


def mellum(folder: Path) -> Path:
    """A checkpoint with its MTP layer, laid out as the published ones are."""
    from safetensors.torch import load_file, save_file

    tiny.save(folder, "mellum", **MELLUM | dict(num_hidden_layers=3, layer_types=[*MELLUM["layer_types"], "sliding_attention"],
                                                mlp_layer_types=["sparse"] * 3))
    weights, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    for name in [n for n in weights if n.startswith("model.layers.2.")]:  # a third layer becomes the MTP block
        weights[name.replace("model.layers.2.", "mtp.layers.0.")] = weights.pop(name)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{name}.weight"] = 1 + 0.1 * torch.randn(64, generator=g)
    weights["mtp.fc.weight"] = 0.2 * torch.randn(64, 128, generator=g)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= dict(num_hidden_layers=2, layer_types=MELLUM["layer_types"], mlp_layer_types=["sparse"] * 2)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- logits


def reference(layers: Any, config: Any, features_TD: Tensor, tokens: list[int], path: list[int]) -> Tensor:
    """MtpModel.forward's own loop with the drafted tokens given: logits [1 + len(path), V] at the root and at each of them. Past the last layer
    the sequence grows by the layer's own state, everything computed anew."""
    from transformers.cache_utils import MtpCache

    K, found = len(layers.layers), []
    before, ids, first, state = features_TD[None], tokens[1:], 1, None
    for depth, token in enumerate([None, *path]):
        if token is not None and depth < K:
            before, ids, first = state, [*ids[1:], token], first + 1
        elif token is not None:
            before, ids = torch.cat([before, state[:, -1:]], 1), [*ids, token]
        positions = torch.arange(first, first + len(ids))[None]
        cache = MtpCache(config=config)
        with torch.no_grad():
            state = layers.forward_layer(min(depth, K - 1), before, positions, cache, input_ids=torch.tensor([ids]))
            found.append(layers.shared_head(state[0, -1]))
    return torch.stack(found)


@torch.inference_mode()
def walk(mtp: MtpDrafter, target: Target, texts: list[list[int]], widths: tuple[int, ...], splits: list[list[int]]
         ) -> list[tuple[int, list[int], Tensor]]:
    """Start each text at its first split and observe it up to its last; then draft a full tree of these widths. -> (row, path, logits)."""
    mtp.reset(len(texts) + 1, 64, target.device)
    states = []
    for b, (text, split) in enumerate(zip(texts, splits, strict=True)):
        feature_1TD = target.extend(target.new_cache(1, 64), slice(0, 1), torch.tensor([text]), taps=("final",))[1]
        assert feature_1TD is not None
        states.append(feature_1TD[0])
        mtp.start(b, torch.tensor(text[: split[0]]), text[split[0]], states[b][: split[0]])
    for r in range(1, len(splits[0])):
        news = [(split[r - 1] + 1, split[r] + 1) for split in splits]
        counts = [stop - start for start, stop in news]
        tokens_BM = torch.tensor([texts[b][s:e] + [7] * (max(counts) - e + s) for b, (s, e) in enumerate(news)])
        features = torch.zeros(len(texts), max(counts), states[0].shape[1])
        for b, (s, e) in enumerate(news):
            features[b, : e - s] = states[b][s - 1 : e - 1]
        mtp.observe(tokens_BM, torch.tensor(counts), features)
        if r == 1 and len(splits[0]) > 2:  # there and back
            mtp._take_in(len(texts))
            mtp.move(0, len(texts))
            mtp.start(0, torch.tensor([5, 6]), 7, states[0][:2])
            mtp.move(len(texts), 0)
    mtp._take_in(len(texts))
    stepper, B = mtp._stepper(len(texts)), len(texts)
    paths: list[list[int]] = [[]]
    parents = [0]
    logits_BWV = stepper.begin(3)[:, None]
    found = [(b, [], logits_BWV[b, 0]) for b in range(B)]
    for depth, width in enumerate(widths):
        # All of the level's nodes, listed backwards: a node's place tells nothing about its parent's.
        level = [(i, [*p, (11 * depth + 5 * w + 3 * i) % 90 + 4]) for i, p in enumerate(paths) for w in range(width)][::-1]
        parents, paths = [i for i, _ in level], [p for _, p in level]
        logits_BWV = stepper.step(torch.tensor([p[-1] for p in paths]).expand(B, -1), torch.tensor(parents).expand(B, -1))
        found += [(b, p, logits_BWV[b, w]) for b in range(B) for w, p in enumerate(paths)]
    return found


def text(length: int, seed: int) -> list[int]:
    return torch.randint(4, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def off(target: Target, mtp: MtpDrafter, texts: list[list[int]], widths: tuple[int, ...], splits: list[list[int]]) -> float:
    """Largest difference from the reference, over all nodes of all rows."""
    worst = 0.0
    config = target.config.get_mtp_config()
    for b, path, logits_V in walk(mtp, target, texts, widths, splits):
        known = texts[b][: splits[b][-1] + 1]
        features_1TD = target.extend(target.new_cache(1, 64), slice(0, 1), torch.tensor([known[:-1]]), taps=("final",))[1]
        assert features_1TD is not None
        worst = max(worst, float((reference(mtp.head.mtp, config, features_1TD[0], known, path)[-1] - logits_V).abs().max()))
    return worst


ROWS = dict(texts=[text(20, 1), text(9, 2), text(30, 3)], splits=[[12, 13, 17], [2, 5, 6], [20, 24, 25]])


@needs_mtp
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 1, 2), (1, 2, 2, 1)])
def test_logits_are_those_of_transformers(K: int, widths: tuple[int, ...]) -> None:
    target, _ = glm(K)
    assert off(target, drafter(K), widths=widths, **ROWS) < 1e-4
    assert off(target, drafter(K), [ROWS["texts"][0]], widths, [[3, 6]]) < 1e-4


@needs_mtp
def test_the_first_tokens_of_a_prompt_have_no_deeper_layers() -> None:
    """Layer j starts at position j + 1: with a prompt of one token there is nothing before it."""
    target, _ = glm(3)
    assert off(target, drafter(3), [text(4, 5), text(4, 6)], (1, 1, 1), [[1], [2]]) < 1e-4


@needs_mtp
def test_a_round_of_transformers_own() -> None:
    """MtpModel.forward itself, whose drafts are argmaxes."""
    from transformers.cache_utils import MtpCache

    K = 3
    target, layers = glm(K)
    prompt = text(15, 8)
    mtp = drafter(K)
    output = target.model(torch.tensor([prompt]), output_hidden_states=True)
    root = int(output.logits[0, -1].argmax())
    cache = MtpCache(config=target.config.get_mtp_config())
    drafts_1K, logits_1KV, _ = layers(input_ids=torch.tensor([[*prompt[1:], root]]), last_hidden_states=output.hidden_states[-1], attention_mask=None,
                                      position_ids=torch.arange(1, len(prompt) + 1)[None], mtp_cache=cache)
    found = complete(target, Recorded(mtp), [Request("a", tuple(prompt))], limits=Limits(max_new_tokens=8), plan=Plan(K))
    assert found[0].tokens[0] == root
    assert Recorded.trees[0] == drafts_1K[0].tolist()
    assert logits_1KV.shape[1] == K


class Recorded(Composite):
    """Remembers the first drafts."""

    trees: list[list[int]] = []

    def __init__(self, mtp: MtpDrafter) -> None:
        super().__init__(NgramDrafter(prompt_lookup_min=60, prompt_lookup_max=60), mtp)
        Recorded.trees = []

    def propose(self, plan: Plan, sampling: Any, noise: Any) -> Any:
        tree = super().propose(plan, sampling, noise)
        Recorded.trees.append(tree.tokens_BN[0, 1:].tolist())
        return tree


# ---- decoding


def requests(*lengths: int, **fields: Any) -> list[Request]:
    return [Request(str(i), tuple(text(n, 100 + i)), seed=i, **fields) for i, n in enumerate(lengths)]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.tokens for c in completions]


@needs_mtp
@pytest.mark.parametrize(("K", "batch_size"), itertools.product([1, 2], [1, 3]))
def test_greedy_output_is_the_targets(K: int, batch_size: int) -> None:
    target, _ = glm(K)
    wanted, limits = requests(9, 4, 17, 30, 6), Limits(max_new_tokens=24, ignore_eos=True)
    plain = complete(target, NoDrafter(), wanted, limits=limits)
    for shape in SHAPES:
        found = complete(target, drafter(K), wanted, limits=limits, batch_size=batch_size, plan=Plan(4, tree=shape))
        assert tokens(found) == tokens(plain), shape
        assert sum(r.drafted for c in found for r in c.rounds) > 0 and {r.source for c in found for r in c.rounds} <= {"mtp", "none"}


@needs_mtp
def test_a_row_is_drafted_alike_in_any_batch() -> None:
    """The same drafts, so the same acceptances, whatever its batch-mates, after refills too."""
    target, _ = glm(2)
    wanted, limits = requests(9, 4, 17, 30, 6), Limits(max_new_tokens=20, ignore_eos=True)
    options: dict[str, Any] = dict(limits=limits, plan=Plan(3, tree=Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))))
    alone, together = (complete(target, drafter(2), wanted, batch_size=n, **options) for n in (1, 3))
    assert [[r.accepted for r in c.rounds] for c in alone] == [[r.accepted for r in c.rounds] for c in together]


@needs_mtp
def test_sampled_drafts_carry_q() -> None:
    target, _ = glm(1)
    seen = []

    class Watched(MtpDrafter):
        def propose(self, plan: Plan, sampling: Any, noise: Any) -> Any:
            seen.append(super().propose(plan, sampling, noise))
            return seen[-1]

    complete(target, Watched(*glm(1)), requests(9, 14), Sampling(temperature=0.8), Limits(max_new_tokens=16), batch_size=2)
    drawn = [t for t in seen if t.width > 1]
    assert drawn and all(t.q_BNV is not None and torch.allclose(t.q_BNV[:, 1:].sum(-1), torch.ones(())) for t in drawn)


def z_of_sampled(found_by: type[MtpDrafter]) -> tuple[float, float]:
    """The martingale z of many sampled answers (eval/lossless.py), and the share of drafts that were accepted."""
    target, layers = glm(2)
    wanted = requests(*range(5, 29)) * 8
    asked = [Request(str(i), r.prompt_ids, seed=i) for i, r in enumerate(wanted)]
    found = complete(target, found_by(target, layers), asked, Sampling(0.9), Limits(max_new_tokens=24, ignore_eos=True), batch_size=64, plan=Plan(3),
                     certificate=True)
    rounds = metrics.all_rounds(found)
    return metrics.martingale_z(found), sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


@needs_mtp
def test_sampled_answers_are_draws_from_the_target() -> None:
    z, accepted = z_of_sampled(MtpDrafter)
    assert abs(z) < 4 and accepted > 0.02


@needs_mtp
def test_drafts_that_were_not_drawn_from_their_q_are_noticed() -> None:
    class Biased(MtpDrafter):
        def propose(self, plan: Plan, sampling: Any, noise: Any) -> Any:
            tree = super().propose(plan, sampling, noise)
            return tree if tree.q_BNV is None else replace(tree, q_BNV=torch.nn.functional.normalize(tree.q_BNV**3, p=1, dim=-1))

    assert abs(z_of_sampled(Biased)[0]) > 4


@needs_mtp
def test_from_a_checkpoint_with_a_sliding_layer(tmp_path: Path) -> None:
    target = Target.load(str(mellum(tmp_path)), device="cpu", dtype="float32", packed=False)
    mtp = MtpDrafter(target)
    assert mtp.head.windows == [12]
    assert off(target, mtp, [text(30, 1), text(18, 2)], (1, 2, 1), [[20, 23, 24], [9, 10, 14]]) < 1e-4
    wanted, limits = requests(9, 25, 17), Limits(max_new_tokens=20, ignore_eos=True)
    plain = complete(target, NoDrafter(), wanted, limits=limits)
    for shape in SHAPES:
        assert tokens(complete(target, mtp, wanted, limits=limits, batch_size=2, plan=Plan(4, tree=shape))) == tokens(plain)


@needs_mtp
def test_packed_with_the_target(tmp_path: Path) -> None:
    folder = str(mellum(tmp_path))
    plain, packed = (Target.load(folder, device="cpu", dtype="float32", packed=p) for p in (False, True))
    wanted, limits = requests(9, 12), Limits(max_new_tokens=12, ignore_eos=True)
    found = [complete(t, MtpDrafter(t), wanted, limits=limits, plan=Plan(3)) for t in (plain, packed)]
    assert tokens(found[0]) == tokens(found[1])
    assert [[r.accepted for r in c.rounds] for c in found[0]] == [[r.accepted for r in c.rounds] for c in found[1]]


# ---- refusals


def test_a_target_without_such_layers() -> None:
    target = Target.from_model(tiny.model(num_hidden_layers=1), tiny.tokenizer(), name="plain")
    with pytest.raises(RecipeError, match="plain has no multi-token-prediction layers .* smaller model or n-grams"):
        MtpDrafter(target)


def test_an_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.from_model(tiny.model(num_hidden_layers=1), tiny.tokenizer(), name="plain")
    target.config.num_mtp_layers = 1
    monkeypatch.delattr(modeling, "MtpModel", raising=False)
    with pytest.raises(RecipeError, match=r"needs transformers 5\.20 or later, found 5\."):
        MtpDrafter(target)


@needs_mtp
def test_a_checkpoint_without_their_weights(tmp_path: Path) -> None:
    """The config's default names one layer, whether the checkpoint has it or not."""
    target = Target.load(str(tiny.save(tmp_path, "glm4_moe", num_hidden_layers=2, **GLM)), device="cpu", dtype="float32", packed=False)
    with pytest.raises(RecipeError, match="cannot be loaded .*weights are missing.*; draft with"):
        MtpDrafter(target)


# ---- mutants: what the parity tests would say to broken layers


@needs_mtp
@pytest.mark.parametrize("wrong", ["position", "state", "early slots"])
def test_broken_layers_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MtpLayers._layer

    def broken(self: MtpLayers, j: int, before: Tensor, ids: Tensor, positions: Tensor, mask: Any, cache: Any, rows: slice, starts: Any) -> Tensor:
        if wrong == "position":  # drafted tokens at the root's position
            positions = positions.clamp(max=int(cache.lengths_B[rows].max()) + 1)
        if wrong == "state" and j > 0:  # the token's own state of the layer below instead of the one before it
            before = before.roll(-1, 1)
        if wrong == "early slots" and mask is not None:
            mask = mask.clone()
            mask[:, :, :j] = True
        return whole(self, j, before, ids, positions, mask, cache, rows, starts)

    target, _ = glm(3)
    monkeypatch.setattr(MtpLayers, "_layer", broken)
    assert off(target, drafter(3), widths=(1, 2, 1, 1), **ROWS) > 1e-2
