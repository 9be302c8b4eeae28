"""vLLM on the CPU as the judge of exported heads (make test-vllm).

Interpolating heads: the last linear map of a random head is solved so that, by *our* module, the head drafts a tiny target's greedy text. If the
engine computes the same function of the exported folder (positions, taps, norms, vocabulary, masks), it accepts every draft; greedy text alone
would be right for any head.

Trained heads: heads of SmolLM2, trained here for some steps each, or those of a folder of benchmarks/all_heads.py that HEADS_FOLDER names. The
engine's acceptance length and rates per position are specdec-eval's within 2 %, and the texts are the same.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from draftheads.data.distill import distill
from draftheads.data.features import Row
from draftheads.heads import build_head
from draftheads.heads.block import BlockHead
from draftheads.heads.checkpoint import HeadMeta, save_head
from draftheads.heads.formats import Tables
from draftheads.heads.formats.transfer import export_head
from draftheads.heads.medusa import Medusa
from draftheads.heads.peagle import PEagle
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.metrics import all_rounds, tau_untrimmed
from draftheads.inference.requests import Limits, Request
from draftheads.inference.target import Target
from draftheads.recipes.schema import Recipe
from draftheads.train.align import align

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import all_heads as heads
import judge

pytestmark = pytest.mark.vllm
GAMMA, FITTED = 3, 40
SERVED = 1 + 6 * (GAMMA + 1)  # whole rounds: no draft is cut at the end
REDUCED = {"draft_vocab_size": 320}
PROMPTS = [[(31 * i + 7 * j) % 500 + 4 for j in range(9 + 4 * i)] for i in range(4)]
WIDE = {"intermediate_size": 1024}  # as many unknowns per output as there are drafts to fit, and more


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(Target, its folder): sizes that vLLM's CPU attention takes."""
    folder = tiny.save(tmp_path_factory.mktemp("target"), hidden_size=256, intermediate_size=256, num_hidden_layers=8, num_attention_heads=8,
                       num_key_value_heads=4, head_dim=32, vocab_size=512, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    return Target.load(str(folder), dtype="float32", device="cpu", packed=False), folder


def rows_of(target: Target, taps) -> list[Row]:
    """The target's greedy text, longer than what is served, so that the last round's drafts are fitted too."""
    requests = [Request(str(i), tuple(p)) for i, p in enumerate(PROMPTS)]
    done = complete(target, NoDrafter(), requests, limits=Limits(FITTED, 128, ignore_eos=True), capture_taps=tuple(taps))
    return [Row(c.request.id, "", torch.tensor([*p, *c.tokens]), torch.tensor([False] * len(p) + [True] * len(c.tokens)),
                features_TF=c.captured.features_TF, final_TD=c.captured.final_TD, lse_T=c.captured.lse_T) for p, c in zip(PROMPTS, done, strict=True)]


def randomise(head: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in head.named_parameters():
        if "norm" in name:
            p.data.copy_(1 + 0.2 * torch.randn(p.shape, generator=generator))
        elif p.dim() == 1:
            p.data.copy_(0.2 * torch.randn(p.shape, generator=generator))
        else:
            p.data.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)


@torch.no_grad()
def interpolate(head, target: Target, steps: int) -> None:
    """Solve the head's last linear map so that its drafts along the greedy text are that text."""
    aligned = align(rows_of(target, head.taps), steps=steps, supervise="answers", max_len=512)
    valid_BTJ, labels_BTJ = aligned.batch.valid_BTJ, aligned.labels_BTJ
    if isinstance(head, Medusa):
        draft_of_V = torch.full((target.geometry.vocab_size,), -1).index_copy(0, head.target_ids_U(), torch.arange(len(head.d2t)))
        for j, states_BTH in enumerate(head.unroll(aligned.batch, steps).states):
            labels_M = draft_of_V[labels_BTJ[..., j][valid_BTJ[..., j]]]
            assert (labels_M >= 0).all()
            head.lm_heads[j].weight.copy_(solved(states_BTH[valid_BTJ[..., j]], torch.eye(len(head.d2t))[labels_M]))
        return
    # The state wanted at (slot, step): the target's own final state there, whose largest logit is the label, seen through the head's norm.
    final_SD = aligned.final_BTD.flatten(0, 1)
    wanted = [final_SD[aligned.teacher_index_BTJ[..., j]] for j in range(steps)]
    if hasattr(head, "norm"):  # which forgets the scale: as large as the states of step 0, or their residual would drown it
        scale = head.fuse(aligned.batch.features_BTF).square().mean().sqrt() if hasattr(head, "fuse") else 1.0
        wanted = [w * scale / head.norm.weight for w in wanted]
    last = list(head.layers.values())[-1] if isinstance(head, PEagle) else head.midlayer if hasattr(head, "midlayer") else head.layers[-1]
    inputs, outputs = calls(head, last, aligned.batch, steps, wanted)
    last.mlp.down_proj.weight.copy_(solved(inputs, outputs))


def calls(head, last, batch, steps, wanted):
    """Run `unroll` with the last layer's output replaced by what is wanted -> (rows of down_proj's input, rows it must give)."""
    valid_BTJ = batch.valid_BTJ
    if isinstance(head, PEagle):  # one call for all depths
        goals, masks = [torch.cat(wanted)], [torch.cat([valid_BTJ[..., j] for j in range(steps)])]
    elif isinstance(head, BlockHead):  # one call for the blocks behind the valid slots
        valid_BT, P = valid_BTJ[..., 0], head.config.block_size
        N = int(valid_BT.sum(1).max())
        slot_BN = valid_BT.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :N]
        goal_BNPH, mask_BNP = torch.zeros(*slot_BN.shape, P, wanted[0].shape[-1]), torch.zeros(*slot_BN.shape, P, dtype=torch.bool)
        for j in range(steps):
            goal_BNPH[:, :, head.first_step + j] = wanted[j].gather(1, slot_BN[..., None].expand(-1, -1, wanted[j].shape[-1]))
            mask_BNP[:, :, head.first_step + j] = valid_BTJ[..., j].gather(1, slot_BN)
        goals, masks = [goal_BNPH.flatten(1, 2)], [mask_BNP.flatten(1, 2)]
    else:  # a call a step
        goals, masks = wanted, [valid_BTJ[..., j] for j in range(steps)]
    residuals, inputs, outputs = [], [], []

    def seen(module, args):
        residuals.append(args[0])

    def forced(module, args, output):
        k = len(residuals) - 1
        inputs.append(args[0][masks[k]])
        outputs.append((goals[k] - residuals[k])[masks[k]])
        return goals[k] - residuals[k]

    handles = [last.post_attention_layernorm.register_forward_pre_hook(seen), last.mlp.down_proj.register_forward_hook(forced)]
    try:
        head.unroll(batch, steps)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(inputs), torch.cat(outputs)


def solved(inputs_MI: torch.Tensor, outputs_MO: torch.Tensor) -> torch.Tensor:
    """The weight [O, I] of least norm that maps the inputs to the outputs."""
    assert inputs_MI.shape[0] <= inputs_MI.shape[1], "more drafts than unknowns"
    # Directions in which the inputs hardly differ are left out: exact there would mean large weights, which make float32's rounding count.
    return torch.linalg.lstsq(inputs_MI.double(), outputs_MO.double(), rcond=1e-4, driver="gelsd").solution.T.float()


def fitted(target: Target, section: dict, *, same_k_norm: bool = False, seed: int = 1):
    geometry = target.geometry
    draft_ids = None
    if section.get("draft_vocab_size"):
        used = {t for row in rows_of(target, ("final",)) for t in row.ids.tolist()}
        rest = [i for i in range(geometry.vocab_size - 1, -1, -1) if i not in used]
        draft_ids = torch.tensor(sorted([*used, *rest][: section["draft_vocab_size"]]))
        assert len(used) < section["draft_vocab_size"]
    head = build_head(section, geometry, draft_ids)
    randomise(head, seed)
    if same_k_norm:
        for layer in head.layers:
            layer.self_attn.k_norm.weight.data.copy_(head.layers[0].self_attn.k_norm.weight)
    head.borrow(target.embed_VD, target.lm_head_VD)
    head.eval().requires_grad_(False)
    interpolate(head, target, head.max_depth if isinstance(head, BlockHead) else GAMMA)
    return head


def ours(target: Target, head) -> float:
    done = complete(target, HeadDrafter(head, target), [Request(str(i), tuple(p)) for i, p in enumerate(PROMPTS)],
                    limits=Limits(SERVED, 128, ignore_eos=True), plan=Plan(GAMMA), batch_size=4)
    return tau_untrimmed(all_rounds(done))


def exported(head, target: Target, folder: Path, layout: str = "vllm") -> Path:
    save_head(head, folder / "ckpt", HeadMeta(target="tiny", geometry=target.geometry))
    export_head(folder / "ckpt", layout, folder / "export", Tables(target.embed_VD, target.lm_head_VD), geometry=target.geometry)
    return folder / "export"


SAME = "two layers of one k_norm"
# vLLM 0.32's CPU kernel for DFlash's context keys norms those of every layer by the first layer's k_norm: lossless, and accepted less.
FAULTY = {"dflash"}
SECTIONS = {
    "medusa": ({"type": "medusa", "medusa_num_heads": GAMMA}, "medusa", "vllm", {}),
    "medusa two blocks": ({"type": "medusa", "medusa_num_heads": GAMMA, "medusa_num_layers": 2}, "medusa", "vllm", {}),
    "medusa, official names": ({"type": "medusa", "medusa_num_heads": GAMMA}, "medusa", "medusa", {}),
    "eagle": ({"type": "eagle", **WIDE}, "eagle", "vllm", {}),
    "eagle3": ({"type": "eagle3", "fc_norm": False, "norm_output": False, **WIDE}, "eagle3", "vllm", {}),
    "eagle3, reduced vocabulary": ({"type": "eagle3", "fc_norm": False, "norm_output": False, **REDUCED, **WIDE}, "eagle3", "vllm", {}),
    "eagle3.1": ({"type": "eagle3", **REDUCED, **WIDE}, "eagle3", "vllm", {}),
    "eagle3.1, speculators": ({"type": "eagle3", **REDUCED, **WIDE}, "eagle3", "speculators", {}),
    "eagle3.1, other taps": ({"type": "eagle3", "taps": [1, 3, 6], **WIDE}, "eagle3", "vllm", {}),
    "peagle": ({"type": "peagle", "num_layers": 2, "depths": GAMMA, **REDUCED, **WIDE}, "eagle3", "vllm", {"parallel_drafting": True}),
    "dflash, one layer": ({"type": "dflash", "num_layers": 1, "block_size": GAMMA + 1, **WIDE}, "dflash", "vllm", {}),
    f"dflash, {SAME}": ({"type": "dflash", "num_layers": 2, "block_size": GAMMA + 1, **WIDE}, "dflash", "vllm", {}),
    f"dflash, {SAME}, reduced": ({"type": "dflash", "num_layers": 2, "block_size": GAMMA + 1, **REDUCED, **WIDE}, "dflash", "vllm", {}),
    "dflash": ({"type": "dflash", "num_layers": 2, "block_size": GAMMA + 1, **WIDE}, "dflash", "vllm", {}),
}


# What we write behind an export's back: the engine reads another function than ours.
ALTERED = {"feedback not normed": {"norm_output": False}, "another tap": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}


@pytest.fixture(scope="module")
def served(target, tmp_path_factory):
    """{name: what vLLM made of it, "": without a draft}. One process for all: starting it takes longest."""
    loaded, folder = target
    jobs = {"": judge.job(folder, PROMPTS, max_tokens=SERVED)}

    def add(name, export, method, extra):
        speculative = {"method": method, "model": str(export), "num_speculative_tokens": GAMMA, **extra}
        jobs[name] = judge.job(folder, PROMPTS, max_tokens=SERVED, speculative=speculative)

    for name, (section, method, layout, extra) in SECTIONS.items():
        head = fitted(loaded, section, same_k_norm=SAME in name)
        assert ours(loaded, head) == GAMMA + 1, name
        export = exported(head, loaded, tmp_path_factory.mktemp("head"), layout)
        add(name, export, method, extra)
        if name == "eagle3.1":
            for change, values in ALTERED.items():
                other = tmp_path_factory.mktemp("altered") / "export"
                shutil.copytree(export, other)
                config = json.loads((other / "config.json").read_text())
                (other / "config.json").write_text(json.dumps(config | values))
                add(change, other, method, extra)
    return dict(zip(jobs, judge.serve(list(jobs.values()), threads=1), strict=True))


def result(served, name):
    if isinstance(served[name], Exception):
        raise served[name]
    return served[name]


@pytest.mark.parametrize("name", SECTIONS)
def test_an_interpolating_head_is_accepted_whole_by_the_engine(name, served):
    found = result(served, name)
    assert found.tokens == result(served, "").tokens
    assert (found.tau == GAMMA + 1) != (name in FAULTY), found


@pytest.mark.parametrize("name", ALTERED)
def test_a_folder_altered_behind_our_back_is_accepted_less(name, served):
    """The mutants: what the test above proves is seen by the engine's acceptance, and not by its text."""
    found = result(served, name)
    assert found.tokens == result(served, "").tokens
    assert found.tau < GAMMA


# ---- regeneration by a server


def test_rows_of_a_vllm_server_are_those_of_this_process_token_by_token(target, tmp_path):
    """Greedy, float32: several turns, short answers and long ones, ends that the server reports."""
    loaded, folder = target
    words = "tell me about the sea and what fish eat when winter comes over cold dark water".split()
    talks = [{"id": f"p{i}", "messages": [{"role": "user", "content": " ".join(words[i % 7 : i % 7 + 3 + i % 4]) + f" {i}"}]} for i in range(24)]
    old = {"role": "assistant", "content": "OLD"}
    talks += [{"id": "talk", "messages": [{"role": "user", "content": "one"}, old, {"role": "user", "content": "two"}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
    data = dict(prompts=str(tmp_path / "prompts.jsonl"), max_new_tokens=24, batch_size=8, shard_rows=8, max_prompt_tokens=200, drop_loops=False,
                features="online")
    recipe = {"target": {"name": str(folder), "dtype": "float32"}, "head": {"type": "eagle3", "taps": [2, 4, 5]}}
    here = distill(Recipe.model_validate(recipe | {"run": str(tmp_path / "here"), "data": data}), target=loaded, progress=False)
    with judge.server(folder, max_model_len=256, threads=1) as url:
        served = data | {"servers": {"urls": [url], "logprobs": True}}
        there = distill(Recipe.model_validate(recipe | {"run": str(tmp_path / "there"), "data": served}), progress=False)
    assert here.counts["failed"] == there.counts["failed"]
    assert len(here) >= 24
    for a, b in zip(here, there, strict=True):
        assert (a.id, a.ids.tolist(), a.flags.tolist(), a.finish_reason) == (b.id, b.ids.tolist(), b.flags.tolist(), b.finish_reason)
        assert len(b.extra["logprobs"]) == int(b.flags.sum())
    assert "retokenised" not in there.counts


# ---- trained heads


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """HEADS_FOLDER: of a finished `benchmarks/all_heads.py train`. Otherwise some steps of training for each head here, on 96 prompts."""
    if folder := os.environ.get("HEADS_FOLDER"):
        return heads.Place(Path(folder).absolute())
    made = heads.Place(tmp_path_factory.mktemp("heads"), limit=96, steps=12)
    heads.distil(made)
    return made


@pytest.mark.parametrize("name", [n for n, h in heads.HEADS.items() if h.method is not None])
def test_the_engine_s_acceptance_is_what_specdec_eval_says(name, place):
    if heads.HEADS[name].tunes and place.steps is not None:
        pytest.skip("a step of a tuned target takes half a minute: HEADS_FOLDER of benchmarks/all_heads.py has one")
    heads.train(place, name)
    heads.engine(place, name)
    found = place.results(name)["engine"]
    print(json.dumps(found, indent=1))
    assert found["tokens"] >= 5000
    assert abs(found["difference"]) < 0.02
    assert max(abs(a - b) for a, b in zip(found["per_position"], found["vllm_per_position"], strict=True)) < 0.02
    assert found["same_texts"] >= 0.9 * found["prompts"], "float32: but for ties the texts are the same token by token"
