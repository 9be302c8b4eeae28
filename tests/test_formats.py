"""Layouts of engines: what is written is what formats list, is read back as the same head, and no silent mistake of an engine stays silent here.

Every parameter is random, the geometry is awkward (head_dim is not hidden / heads, grouped queries, rotary base 5e5), vocabularies are reduced.
"""

from __future__ import annotations

import json
import os
import pickle
import shlex
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tiny
from draftheads.eval import cli, subject
from draftheads.heads import build_head, head_types
from draftheads.heads.base import DraftBatch, DraftHead
from draftheads.heads.checkpoint import HeadMeta, load_head, read_meta, save_head
from draftheads.heads.formats import FORMATS, Tables, flat, layout, speculators, transfer, vllm
from draftheads.heads.formats.transfer import export_head, import_head
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.tables import read_tables
from draftheads.inference.target import Target
from draftheads.recipes.schema import Geometry, RecipeError

V, H, D, INNER, U = 128, 64, 24, 80, 50
ROPE = {"rope_type": "default", "rope_theta": 500000.0}
PLAIN = {"fc_norm": False, "norm_output": False}
BEFORE = {"norm_before_residual": True, "norm_before_fc": True}


def geometry(**changes) -> Geometry:
    base = dict(hidden_size=H, intermediate_size=INNER, num_layers=8, num_heads=6, num_kv_heads=2, head_dim=D, vocab_size=V, max_positions=256,
                rope_parameters=ROPE)
    return Geometry(**(base | changes))


def tables(seed: int = 9) -> Tables:
    generator = torch.Generator().manual_seed(seed)
    return Tables(torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator) * 0.15)


def make_head(type: str, draft: int | None = None, geo: Geometry | None = None, **section) -> DraftHead:
    generator = torch.Generator().manual_seed(0)
    ids_U = None if draft is None else torch.randperm(V, generator=generator)[:draft].sort().values
    head = build_head({"type": type, "draft_vocab_size": draft} | section, geo or geometry(), ids_U)
    head.borrow(tables().embed_VD, tables().lm_head_VD)
    with torch.no_grad():
        for p in head.parameters():
            p.uniform_(0.5, 1.5, generator=generator) if p.dim() == 1 else p.normal_(0, 0.12, generator=generator)
    return head


def logits(head: DraftHead, steps: int = 3) -> torch.Tensor:
    """[J, T, V] over one random row; −inf where the draft vocabulary has no token."""
    head.borrow(tables().embed_VD, tables().lm_head_VD)
    generator, T = torch.Generator().manual_seed(3), 9
    batch = DraftBatch(torch.randn(1, T, len(head.taps) * H, generator=generator), torch.randint(V, (1, T, steps), generator=generator),
                       torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long), torch.ones(1, T, steps, dtype=torch.bool))
    with torch.no_grad():
        found = torch.stack([head.logits(s[0], j) for j, s in enumerate(head.unroll(batch, steps).states)])
    return torch.full((steps, T, V), float("-inf")).index_copy(2, head.target_ids_U(), found)


def same(a: DraftHead, b: DraftHead) -> None:
    x, y = logits(a), logits(b)
    assert torch.equal(x.isinf(), y.isinf()), "the same draft vocabulary"
    torch.testing.assert_close(x.nan_to_num(neginf=0), y.nan_to_num(neginf=0), atol=1e-6, rtol=1e-6)


def checkpoint(folder: Path, head: DraftHead, target: str = "org/model") -> Path:
    save_head(head, folder, HeadMeta(target=target, template_hash="abcd", extra={"recipe": {"run": str(folder)}}))
    return folder


def layer(prefix: str, X: int = H) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (6 * D, X), f"{prefix}.self_attn.k_proj.weight": (2 * D, X),
        f"{prefix}.self_attn.v_proj.weight": (2 * D, X), f"{prefix}.self_attn.o_proj.weight": (H, 6 * D),
        f"{prefix}.mlp.gate_proj.weight": (INNER, H), f"{prefix}.mlp.up_proj.weight": (INNER, H), f"{prefix}.mlp.down_proj.weight": (H, INNER),
        f"{prefix}.post_attention_layernorm.weight": (H,),
    }


def eagle3_shapes(rows: int | None, mid: str = "midlayer", norms: bool = False, vocabulary: int = U) -> dict[str, tuple[int, ...]]:
    return {
        "fc.weight": (H, 3 * H), "norm.weight": (H,), f"{mid}.hidden_norm.weight": (H,), f"{mid}.input_layernorm.weight": (H,),
        **layer(mid, 2 * H), **({"d2t": (vocabulary,), "t2d": (V,)} if vocabulary < V else {}),
        **({} if rows is None else {"lm_head.weight": (rows, H)}),
        **({f"fc_norm.{i}.weight": (H,) for i in range(3)} if norms else {}),
    }


EAGLE1 = {"fc.weight": (H, 2 * H), "fc.bias": (H,), **layer("layers.0")}
DFLASH = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,), "d2t": (U,), "t2d": (V,), "lm_head.weight": (U, H),
          **{n: s for i in range(2) for n, s in (*layer(f"layers.{i}").items(), (f"layers.{i}.input_layernorm.weight", (H,)),
                                                 (f"layers.{i}.self_attn.q_norm.weight", (D,)), (f"layers.{i}.self_attn.k_norm.weight", (D,)))}}
DSPARK = DFLASH | {"markov_head.markov_w1.weight": (V, 16), "markov_head.markov_w2.weight": (U, 16), "confidence_head.proj.weight": (1, H + 16),
                   "confidence_head.proj.bias": (1,)}
PEAGLE = eagle3_shapes(U, norms=True) | {"mask_hidden": (1, 3 * H), "layers.1.input_layernorm.weight": (H,), **layer("layers.1")}
OFFICIAL_MEDUSA = {name: shape for h in range(3) for name, shape in
                   ((f"{h}.0.linear.weight", (H, H)), (f"{h}.0.linear.bias", (H,)), (f"{h}.1.weight", (V, H)))}
VLLM_MEDUSA = {**{f"blocks.{h}.layers.{n}.weight": (H, H) for h in range(3) for n in range(2)},
               **{f"blocks.{h}.layers.{n}.bias": (H,) for h in range(3) for n in range(2)}}
EAGLE3_CASES = [
    ("vllm", {"draft": U}, eagle3_shapes(U, norms=True)),
    ("vllm", {}, eagle3_shapes(None, norms=True, vocabulary=V)),  # vLLM shares the target's
    ("vllm", {"draft": U, "freeze_lm_head": False, "taps": [1, 3, 6], **PLAIN}, eagle3_shapes(U)),
    ("sglang", {"draft": U, **PLAIN}, eagle3_shapes(U)),
    ("sglang", {}, eagle3_shapes(V, norms=True, vocabulary=V)),
    ("trtllm", {"draft": U}, eagle3_shapes(U, norms=True)),
    ("speculators", {"draft": U}, eagle3_shapes(U, "layers.0", norms=True) | {"embed_tokens.weight": (V, H)}),
    ("eagle", {"draft": U, **PLAIN}, eagle3_shapes(U)),
    ("eagle", PLAIN, eagle3_shapes(V, vocabulary=V)),
    ("speculators", {}, eagle3_shapes(V, "layers.0", norms=True, vocabulary=V) | {"embed_tokens.weight": (V, H)}),
    # Forms of published heads, where the engine has them.
    ("vllm", {"draft": U, **PLAIN, **BEFORE}, eagle3_shapes(U) | {"input_norm.weight": (3 * H,)}),
    ("speculators", {"draft": U, **PLAIN, **BEFORE}, eagle3_shapes(U, "layers.0") | {"input_norm.weight": (3 * H,), "embed_tokens.weight": (V, H)}),
    ("trtllm", {"draft": U, **PLAIN, "norm_before_fc": True, "fc_bias": True}, eagle3_shapes(U) | {"input_norm.weight": (3 * H,), "fc.bias": (H,)}),
    ("sglang", {"draft": U, **PLAIN, "fc_bias": True}, eagle3_shapes(U) | {"fc.bias": (H,)}),
]
CASES = [
    *((to, "eagle3", section, shapes) for to, section, shapes in EAGLE3_CASES),
    *((to, "eagle", {}, EAGLE1) for to in ("vllm", "sglang", "eagle")),
    ("sglang", "eagle", {"fc_bias": True}, EAGLE1),
    ("vllm", "peagle", {"draft": U, "num_layers": 2, "depths": 3, "mask_token_id": 7}, PEAGLE),
    ("vllm", "peagle", {"draft": U, "num_layers": 2, "depths": 3, "norm_before_residual": True}, PEAGLE),
    ("vllm", "dflash", {"draft": U, "num_layers": 2, "block_size": 4, "taps": [2, 5], "mask_token_id": 7}, DFLASH),
    ("vllm", "dflash", {"num_layers": 2, "block_size": 4, "taps": [2, 5]},
     {n: s for n, s in DFLASH.items() if n not in ("d2t", "t2d", "lm_head.weight")}),  # vLLM stops at a d2t of a whole vocabulary
    ("vllm", "dspark", {"draft": U, "num_layers": 2, "block_size": 3, "taps": [2, 5], "markov_rank": 16}, DSPARK),
    ("medusa", "medusa", {"medusa_num_heads": 3}, OFFICIAL_MEDUSA),
    ("medusa", "medusa", {"medusa_num_heads": 3, "freeze_lm_head": True}, OFFICIAL_MEDUSA),
    ("vllm", "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 2}, VLLM_MEDUSA | {f"lm_heads.{h}.weight": (V, H) for h in range(3)}),
    ("vllm", "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 2, "freeze_lm_head": True}, VLLM_MEDUSA | {"lm_head.weight": (V, H)}),
]


@pytest.mark.parametrize(("to", "type", "section", "shapes"), CASES)
def test_what_is_written_is_what_the_format_lists_and_the_same_head(tmp_path, to, type, section, shapes):
    head = make_head(type, **section)
    ckpt = checkpoint(tmp_path / "ckpt", head)
    report = export_head(ckpt, to, tmp_path / "out", tables())
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(weights)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == shapes
    assert report.tensors == len(shapes)
    again, meta = load_head(tmp_path / "out", geometry=geometry(), template_hash="abcd")
    same(head, again)
    assert (meta.layout, meta.target) == (to, "org/model")
    assert ("d2t" in tensors) == (type != "medusa" and section.get("draft") is not None)
    if "d2t" in tensors:
        assert tensors["d2t"].dtype == torch.int64
        assert torch.equal(torch.arange(len(tensors["d2t"])) + tensors["d2t"], head.target_ids_U())
        assert tensors["t2d"].sum() == len(tensors["d2t"])
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name
        assert path.stat().st_mode & 0o777 == 0o644
    # What was exported is a checkpoint itself.
    export_head(tmp_path / "out", to, tmp_path / "twice", tables())
    assert (tmp_path / "twice" / weights.name).read_bytes() == weights.read_bytes()


def test_configs_say_what_engines_ask_for(tmp_path):
    ckpt = checkpoint(tmp_path / "ckpt", make_head("eagle3", U, taps=[1, 3, 6]))
    configs = {}
    for to in ("vllm", "speculators", "trtllm"):
        export_head(ckpt, to, tmp_path / to, tables())
        configs[to] = json.loads((tmp_path / to / "config.json").read_text())
    found = configs["vllm"]
    for key, value in {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": U, "vocab_size": V,
        "tie_word_embeddings": False, "head_dim": D, "attention_bias": False, "mlp_bias": False, "bias": False, "norm_before_residual": False,
        "fc_norm": True, "norm_output": True, "rope_theta": 500000.0, "rope_scaling": None, "rope_parameters": ROPE, "torch_dtype": "float32",
    }.items():
        assert found[key] == value, key
    assert found["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert found["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert "target_hidden_size" not in found and "freeze_lm_head" not in found
    assert "eagle3_layers_to_capture={0, 2, 5}" in (tmp_path / "trtllm" / "README.md").read_text()
    found = configs["speculators"]
    assert (found["norm_before_residual"], found["target_hidden_size"], found["eagle_aux_hidden_state_layer_ids"]) == (False, H, [1, 3, 6])
    assert found["transformer_layer_config"]["rope_theta"] == 500000.0
    assert found["transformer_layer_config"]["num_aux_hidden_states"] == 3  # vLLM reads it there and nowhere else
    assert found["speculators_config"]["verifier"] == {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
    export_head(checkpoint(tmp_path / "one", make_head("eagle")), "vllm", tmp_path / "e1", tables())
    found = json.loads((tmp_path / "e1" / "config.json").read_text())
    assert (found["architectures"], found["bias"]) == (["LlamaForCausalLMEagle", "LlamaForCausalLM"], False)
    assert not load_file(tmp_path / "e1" / "model.safetensors")["fc.bias"].any()
    export_head(checkpoint(tmp_path / "m", make_head("medusa", medusa_num_heads=3)), "medusa", tmp_path / "md", tables())
    found = json.loads((tmp_path / "md" / "config.json").read_text())
    assert (found["medusa_num_heads"], found["medusa_num_layers"], found["medusa_fc_bias"], found["hidden_size"]) == (3, 1, True, H)
    assert [k for k in found if "num" in k and "heads" in k] == ["medusa_num_heads"]
    blocks = {"num_layers": 1, "block_size": 3, "taps": [2, 5], "mask_token_id": 7}
    for type, section, name, tokens in (("peagle", {"num_layers": 2, "depths": 3}, "LlamaForCausalLMEagle3", 3),  # the only name vLLM leaves as it is
                                        ("dflash", blocks, "DFlashDraftModel", 2), ("dspark", blocks | {"markov_rank": 16}, "Qwen3DSparkModel", 3)):
        export_head(checkpoint(tmp_path / type, make_head(type, **section)), "vllm", tmp_path / f"{type}-out", tables())
        found = json.loads((tmp_path / f"{type}-out" / "config.json").read_text())
        assert found["architectures"] == [name]
        assert f'"num_speculative_tokens": {tokens}' in (tmp_path / f"{type}-out" / "README.md").read_text()
    assert found["dflash_config"]["target_layer_ids"] == found["target_layer_ids"] == [1, 4]
    assert (found["markov_rank"], found["mask_token_id"], found["enable_confidence_head"]) == (16, 7, True)
    ckpt = checkpoint(tmp_path / "forms", make_head("eagle3", U, **PLAIN, **BEFORE))
    for to in ("vllm", "speculators"):
        export_head(ckpt, to, tmp_path / f"forms-{to}", tables())
        found = json.loads((tmp_path / f"forms-{to}" / "config.json").read_text())
        assert found["norm_before_residual"] is found["norm_before_fc"] is True
    export_head(checkpoint(tmp_path / "fc", make_head("eagle3", U, **PLAIN, norm_before_fc=True)), "trtllm", tmp_path / "forms-trtllm", tables())
    assert json.loads((tmp_path / "forms-trtllm" / "config.json").read_text())["eagle_config"]["norm_before_fc"] is True


def test_dtype_rounds_once_and_is_kept(tmp_path):
    head = make_head("eagle3", U)
    ckpt = checkpoint(tmp_path / "ckpt", head)
    export_head(ckpt, "vllm", tmp_path / "out", tables(), dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
    assert torch.equal(tensors["fc.weight"], head.state_dict()["fc.weight"].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    export_head(tmp_path / "out", "sglang", tmp_path / "next", tables())
    assert torch.equal(load_file(tmp_path / "next" / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])


# ---- the mistakes that engines make no noise about


def config(**changes):
    def tamper(folder: Path) -> None:
        path = folder / "config.json"
        found = json.loads(path.read_text())
        for key, value in changes.items():
            part, _, inner = key.partition("__")
            place = found if not inner else found[part]
            name = inner or part
            if value is ...:
                place.pop(name)
            else:
                place[name] = value
        path.write_text(json.dumps(found))

    return tamper


def tensors(change):
    def tamper(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        found = load_file(path)
        change(found)
        save_file({n: t.contiguous() for n, t in found.items()}, path)

    return tamper


def absolute(found) -> None:
    found["d2t"] += torch.arange(U)


def unsorted(found) -> None:
    ids = (found["d2t"] + torch.arange(U)).flip(0)
    found["d2t"], found["lm_head.weight"] = ids - torch.arange(U), found["lm_head.weight"].flip(0)


AUX = "eagle_aux_hidden_state_layer_ids"
MISTAKES = [
    ("medusa", config(medusa_fc_bias=...), "medusa_fc_bias"),
    ("medusa", config(medusa_fc_bias=False), "write true"),
    ("medusa", config(medusa_num_heads=5), "the file holds 3"),
    ("medusa", config(num_attention_heads=6), "remove it"),
    ("medusa", config(hidden_size=...), "vLLM takes 4096"),
    ("medusa", tensors(lambda t: t.pop("1.0.linear.bias")), "missing blocks.1.0.linear.bias"),
    ("speculators", config(norm_before_residual=...), "vLLM takes that for true"),
    ("speculators", config(norm_before_residual=True), "norm_before_residual is True"),
    ("speculators", config(transformer_layer_config__rope_theta=10000.0), "make them agree"),
    ("speculators", config(**{AUX: [1, 3, 4]}), "taps"),
    ("speculators", config(draft_vocab_size=...), "draft_vocab_size"),
    ("vllm", config(norm_before_residual=...), "write what it was trained with"),
    ("vllm", config(norm_before_residual=True), "norm_before_residual is True"),
    ("vllm", config(norm_before_fc=True), "make them agree"),
    ("vllm", config(norm_before_fc=True, eagle_config__norm_before_fc=True), "norm_before_fc is True"),
    ("vllm", config(**{AUX: [1, 3, 4]}), "must be one less"),
    ("vllm", config(**{AUX: [1, 3, 4], "eagle_config": {AUX: [0, 2, 3]}}), "neither may be edited alone"),
    ("vllm", config(**{AUX: [4, 2, 5], "eagle_config": {AUX: [3, 1, 4]}}), "rising"),
    ("vllm", config(**{AUX: [2, 4, 9], "eagle_config": {AUX: [1, 3, 8]}}), "in 0 … 7"),
    ("vllm", config(**{AUX: ...}), AUX),
    ("vllm", config(eagle_config=...), "SGLang takes layers 2"),
    ("vllm", config(rope_theta=10000.0), "make them agree"),
    ("vllm", config(rope_theta=10000.0, rope_parameters={"rope_theta": 10000.0}), "rope_parameters"),
    ("vllm", config(rope_parameters=...), "theta 10000"),
    ("vllm", config(target_hidden_size=None), "target_hidden_size: null"),
    ("vllm", config(tie_word_embeddings=True), "tie_word_embeddings"),
    ("vllm", config(draft_vocab_size=...), "draft_vocab_size"),
    ("vllm", config(draft_vocab_size=None), "draft_vocab_size is null"),
    ("vllm", config(num_hidden_layers=8), "num_hidden_layers is 8"),
    ("vllm", config(vocab_size=96), "vocab_size 96"),
    ("vllm", config(fc_norm=False), "fc_norm"),
    ("vllm", config(norm_output=False), "norm_output"),
    ("vllm", config(bias=True), "bias is true"),
    ("vllm", tensors(absolute), "subtract the draft ids"),
    ("vllm", tensors(unsorted), "must rise"),
    ("vllm", tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight is missing"),
    ("vllm", tensors(lambda t: t.pop("d2t")), "d2t is missing"),
    ("vllm", tensors(lambda t: t.update(d2t=t["d2t"].int())), "int64"),
    ("vllm", tensors(lambda t: t.update(extra=torch.ones(2))), "unknown extra"),
    ("vllm", tensors(lambda t: t["norm.weight"].mul_(2)), "sha256"),
    ("sglang eagle", config(architectures=["LlamaForCausalLMEagle"]), "no LlamaForCausalLMEagle alone"),
    ("sglang eagle", config(bias=True), "write false"), ("vllm eagle", config(bias=True), "attention biases"),
    ("eagle eagle", config(bias=False), "write true"),
    ("sglang eagle", tensors(lambda t: t.pop("fc.bias")), "missing one random"),
    ("vllm eagle", tensors(lambda t: t["fc.bias"].add_(1)), "vLLM drops it silently"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One exported folder of each layout."""
    base = tmp_path_factory.mktemp("written")
    heads = {"eagle3": make_head("eagle3", U), "eagle": make_head("eagle"), "medusa": make_head("medusa", medusa_num_heads=3)}
    for type, head in heads.items():
        checkpoint(base / type, head)
    for name, type in (("medusa", "medusa"), ("speculators", "eagle3"), ("vllm", "eagle3"), ("sglang eagle", "eagle"), ("vllm eagle", "eagle"),
                       ("eagle eagle", "eagle")):
        export_head(base / type, name.split()[0], base / "out" / name, tables())
    return base


@pytest.mark.parametrize(("name", "tamper", "said"), MISTAKES)
def test_mistakes_in_a_written_folder_are_errors(written, tmp_path, name, tamper, said):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in (written / "out" / name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    load_head(folder)
    tamper(folder)
    with pytest.raises(RecipeError) as error:
        load_head(folder)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def swapped(files):
    t = files.tensors
    t["midlayer.mlp.gate_proj.weight"], t["midlayer.mlp.up_proj.weight"] = t["midlayer.mlp.up_proj.weight"], t["midlayer.mlp.gate_proj.weight"]


def shifted(files):
    files.config[AUX] = [k - 1 for k in files.config[AUX]]
    files.config["eagle_config"] = {AUX: [k - 1 for k in files.config["eagle_config"][AUX]]}


@pytest.mark.parametrize(("mutant", "said"), [
    (swapped, "logits differ"), (shifted, "taps"), (lambda f: f.tensors["fc.weight"].add_(1e-3), "logits differ"),
    (lambda f: f.tensors.pop("norm.weight"), "missing norm.weight"), (lambda f: f.config.update(rms_norm_eps=1e-2), "rms_norm_eps"),
])
def test_a_faulty_exporter_is_found_out_and_leaves_nothing(written, tmp_path, monkeypatch, mutant, said):
    right = vllm.export

    def wrong(head, meta, lent):
        files = right(head, meta, lent)
        files.tensors = {n: t.clone() for n, t in files.tensors.items()}
        mutant(files)
        return files

    monkeypatch.setattr(vllm, "export", wrong)
    with pytest.raises(RecipeError, match=said):
        export_head(written / "eagle3", "vllm", tmp_path / "out", tables())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["sha256_file", "compare"])
def test_a_kill_leaves_no_folder(written, tmp_path, place):
    child = os.fork()
    if child == 0:
        setattr(transfer, place, lambda *a: os.kill(os.getpid(), signal.SIGKILL))
        try:
            export_head(written / "eagle3", "vllm", tmp_path / "out", tables())
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "out").exists()
    export_head(written / "eagle3", "vllm", tmp_path / "out", tables())
    load_head(tmp_path / "out")


def test_the_commands_that_an_export_names_can_be_pasted(tmp_path):
    for to, type, section in (("vllm", "eagle", {}), ("vllm", "eagle3", {}), ("vllm", "medusa", {}), ("vllm", "peagle", {"depths": 3}),
                              ("vllm", "dflash", {"block_size": 4, "taps": [2, 5]}), ("vllm", "dspark", {"block_size": 3, "taps": [2, 5]})):
        report = export_head(checkpoint(tmp_path / "ckpt", make_head(type, **section)), to, tmp_path / "out", tables())
        words = shlex.split(report.notes[0])
        assert words[:3] == ["vllm", "serve", "TARGET"]
        assert json.loads(words[4])["model"] == "THIS_FOLDER"
    for type, said in (("eagle", "use_eagle3=False"), ("eagle3", "use_eagle3=True")):
        section = PLAIN if type == "eagle3" else {}
        report = export_head(checkpoint(tmp_path / "ckpt", make_head(type, **section)), "eagle", tmp_path / "out", tables())
        assert said in report.notes[0]


def test_an_export_does_not_replace_what_it_reads(written, tmp_path):
    export_head(written / "eagle3", "vllm", tmp_path / "out", tables())
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for place in (tmp_path / "out", tmp_path / "x" / ".." / "out", tmp_path / "link"):
        with pytest.raises(RecipeError, match="is the checkpoint that is read.*choose another --out"):
            export_head(tmp_path / "out", "speculators", place, tables())
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_only_exports_are_replaced(written, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    for place in (mine, written / "eagle3", mine / "thesis.txt"):
        with pytest.raises(RecipeError, match="choose another --out"):
            export_head(written / "eagle3", "vllm", place, tables())
    assert (mine / "thesis.txt").read_text() == "years"
    for _ in range(2):
        export_head(written / "eagle3", "vllm", tmp_path / "out", tables())


@pytest.mark.parametrize(("type", "section", "to", "said"), [
    ("eagle3", {"draft": U}, "eagle", "no fc_norm"), ("eagle3", {"taps": [1, 3, 6], **PLAIN}, "eagle", r"taps \[2, 4, 5\]"),
    ("eagle3", {"taps": [1, 3]}, "sglang", "three"), ("eagle3", {"taps": [1, 3, "final"]}, "vllm", "engines tap layers only"),
    ("eagle3", {**PLAIN, "norm_before_residual": True}, "sglang", "vllm, speculators"),
    ("eagle3", {**PLAIN, "norm_before_fc": True}, "sglang", "vllm, speculators, trtllm"),
    ("eagle3", {**PLAIN, "norm_before_residual": True}, "trtllm", "knows no such thing"),
    ("eagle3", {**PLAIN, **BEFORE}, "eagle", "knows no such thing"),
    ("eagle3", {"fc_bias": True}, "vllm", "sglang, trtllm"), ("eagle3", {"fc_bias": True}, "speculators", "sglang, trtllm"),
    ("peagle", {"fc_bias": True}, "vllm", "head.fc_bias is true"), ("medusa", {"draft": U}, "vllm", "over a reduced vocabulary"),
    ("medusa", {"draft": U, "freeze_lm_head": True}, "vllm", "over a reduced vocabulary"),
    ("eagle3", {}, "medusa", "it takes medusa heads"), ("eagle", {}, "speculators", "it takes eagle3"), ("eagle", {}, "trtllm", "it takes eagle3"),
    ("eagle", {"draft": U}, "vllm", "--whole-vocabulary"), ("eagle", {"freeze_lm_head": False}, "vllm", "trained its own"),
    ("eagle", {"fc_bias": True}, "vllm", "drops it silently"),
    ("medusa", {"draft": U}, "medusa", "no reduced vocabulary"), ("medusa", {"medusa_num_layers": 2}, "medusa", "one block's weights"),
    ("medusa", {"taps": [3]}, "vllm", "final state only"), ("medusa", {}, "sglang", "it takes eagle"), ("eagle3", {}, "hydra", "only be imported"),
    ("eagle3", {}, "vlm", "did you mean 'vllm'"),
])
def test_what_an_engine_cannot_express_is_refused(tmp_path, type, section, to, said):
    with pytest.raises(RecipeError, match=said):
        export_head(checkpoint(tmp_path / "ckpt", make_head(type, **section)), to, tmp_path / "out", tables())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("type", "section", "to"), [
    ("eagle", {"draft": U}, "vllm"), ("eagle", {"draft": U}, "eagle"), ("medusa", {"draft": U, "freeze_lm_head": True}, "vllm"),
    ("medusa", {"draft": U, "freeze_lm_head": True}, "medusa"), ("eagle3", {"draft": U}, "vllm"), ("medusa", {"freeze_lm_head": True}, "vllm"),
])
def test_a_head_that_borrows_its_lm_head_is_exported_over_the_whole_vocabulary(tmp_path, type, section, to):
    head = make_head(type, **section)
    checkpoint(tmp_path / "ckpt", head)
    report = export_head(tmp_path / "ckpt", to, tmp_path / "out", tables(), whole_vocabulary=True)
    assert any("trained over a reduced one" in note for note in report.notes) == ("draft" in section)
    wide, _ = load_head(tmp_path / "out")
    assert len(wide.d2t) == V
    narrow, whole, ids_U = logits(head), logits(wide), head.target_ids_U()
    assert whole.isfinite().all()
    torch.testing.assert_close(whole[..., ids_U], narrow[..., ids_U], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("type", ["eagle3", "medusa"])
def test_an_lm_head_of_a_reduced_vocabulary_is_not_made_whole(tmp_path, type):
    checkpoint(tmp_path / "ckpt", make_head(type, draft=U, freeze_lm_head=False))
    with pytest.raises(RecipeError, match="freeze_lm_head: true"):
        export_head(tmp_path / "ckpt", "vllm", tmp_path / "out", tables(), whole_vocabulary=True)
    assert not (tmp_path / "out").exists()


def test_local_targets_are_not_named(tmp_path):
    (tmp_path / "target").mkdir()
    for name in (str(tmp_path / "target"), "./x", "~/x", "a/b/c", "x.gguf"):
        assert transfer.public_name(name) == ""
    assert transfer.public_name("org/model") == "org/model"
    assert transfer.public_name("smollm2-135m") == "smollm2-135m"
    for to in ("vllm", "speculators"):
        export_head(checkpoint(tmp_path / "ckpt", make_head("eagle3", U), str(tmp_path / "target")), to, tmp_path / to, tables())
        assert read_meta(tmp_path / to).target == ""
        assert all(str(tmp_path).encode() not in p.read_bytes() for p in (tmp_path / to).iterdir())


# ---- published heads


def publish(folder: Path, config: dict, tensors: dict[str, torch.Tensor], pickle: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t.detach().clone().contiguous() for n, t in tensors.items()}
    torch.save(tensors, folder / pickle) if pickle else save_file(tensors, folder / "model.safetensors")
    return folder


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": H, "intermediate_size": INNER,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": D, "vocab_size": V, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
         "max_position_embeddings": 256}


def eagle3(**changes) -> tuple[DraftHead, dict[str, torch.Tensor]]:
    head = make_head("eagle3", U, freeze_lm_head=False, **({**PLAIN} | changes))
    return head, dict(head.state_dict())


def bring(folder: Path, out: Path, geo: Geometry | None = None, **options) -> DraftHead:
    geo = geo or geometry()
    import_head(str(folder), out, "org/model", geo, **options)
    head, meta = load_head(out, geometry=geo)
    assert meta.geometry == geo
    return head


def test_official_eagle3_as_published(tmp_path):
    """No tap keys, no rope_theta, an embedding, lm_head rows in the order of an unsorted d2t, half precision, a pickle."""
    head, weights = eagle3(geo=geometry(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    order = torch.randperm(U, generator=torch.Generator().manual_seed(5))
    ids = (weights["d2t"] + torch.arange(U))[order]
    weights |= {"d2t": ids - torch.arange(U), "lm_head.weight": weights["lm_head.weight"][order], "embed_tokens.weight": torch.randn(V, H)}
    published = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"draft_vocab_size": U}
    folder = publish(tmp_path / "hub", published, weights, "pytorch_model.bin")
    with pytest.raises(RecipeError, match="--allow-pickle"):
        bring(folder, tmp_path / "out")
    found = bring(folder, tmp_path / "out", allow_pickle=True)
    same(head, found)
    assert found.own["rope_parameters"]["rope_theta"] == 10000.0
    assert found.taps == (2, 4, 5)
    facts = read_meta(tmp_path / "out").extra["imported"]["facts"]
    assert any("2, L//2, L-3" in f for f in facts) and any("embedding" in f for f in facts) and any("10000" in f for f in facts)
    # What it has otherwise than its target is no other target for decoding, and lives through another export.
    stub = SimpleNamespace(geometry=geometry(), embed_VD=tables().embed_VD, lm_head_VD=tables().lm_head_VD, device=torch.device("cpu"),
                           dtype=torch.float32, tokenizer=range(V))
    assert HeadDrafter(found, stub).taps == (2, 4, 5)
    with pytest.raises(RecipeError, match="another target"):
        HeadDrafter(head, stub)
    export_head(tmp_path / "out", "eagle", tmp_path / "again", tables(), geometry=geometry())
    same(head, load_head(tmp_path / "again", geometry=geometry())[0])
    assert json.loads((tmp_path / "again" / "config.json").read_text())["rope_theta"] == 10000.0


@pytest.mark.parametrize("kind", ["specforge", "modelopt", "layers.0", "vllm keys", "speculators"])
def test_eagle3_of_other_trainers(tmp_path, kind):
    head, weights = eagle3(taps=[1, 3, 6])
    flat_config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": U}
    nested = {"eagle_config": {AUX: [0, 2, 5], "use_aux_hidden_state": True}}
    if kind in ("specforge", "modelopt"):
        if kind == "modelopt":
            weights.pop("t2d")
        folder = publish(tmp_path / "a", flat_config | nested, weights)
    elif kind == "speculators":
        weights = {n.replace("midlayer.", "layers.0."): t for n, t in weights.items()} | {"embed_tokens.weight": torch.randn(V, H)}
        folder = publish(tmp_path / "a", {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": U, "target_hidden_size": H,
            "norm_before_residual": False, AUX: [1, 3, 6], "transformer_layer_config": LLAMA,
            "speculators_config": {"verifier": {"name_or_path": "org/other"}}}, weights)
        assert read_meta(folder).target == "org/other"
    else:
        renamed = {n.replace("midlayer.", "layers.0.") if kind == "layers.0" else n: t for n, t in weights.items()}
        folder = publish(tmp_path / "a", flat_config | {AUX: [1, 3, 6]}, renamed)
    found = bring(folder, tmp_path / "out")
    assert found.taps == (1, 3, 6)
    same(head, found)
    same(head, load_head(folder, geometry=geometry())[0])  # without an import


@pytest.mark.parametrize("kind", ["flat", "speculators", "speculators, unsaid"])
def test_heads_that_add_to_the_normed_state(tmp_path, kind):
    """speculators' default is true and a flat config's is false; read the wrong way, the head drafts something else."""
    head, weights = eagle3(norm_before_residual=True)
    flag = {"norm_before_residual": True}
    if kind == "flat":
        folder = publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U} | flag, weights)
        plain = publish(tmp_path / "b", LLAMA | {"draft_vocab_size": U}, weights)
    else:
        weights = {n.replace("midlayer.", "layers.0."): t for n, t in weights.items()}
        said = {"speculators_model_type": "eagle3", "draft_vocab_size": U, "transformer_layer_config": LLAMA}
        folder = publish(tmp_path / "a", said | (flag if kind == "speculators" else {}), weights)
        plain = publish(tmp_path / "b", said | {"norm_before_residual": False}, weights)
    same(head, bring(folder, tmp_path / "out"))
    facts = read_meta(tmp_path / "out").extra["imported"]["facts"]
    assert any("taken for true" in f for f in facts) == (kind == "speculators, unsaid")
    with pytest.raises(AssertionError):
        same(head, load_head(plain, geometry=geometry())[0])
    export_head(tmp_path / "out", "vllm", tmp_path / "vllm", tables())
    same(head, load_head(tmp_path / "vllm")[0])


def test_other_forms_of_eagle3(tmp_path):
    """norm_before_fc where vLLM looks first, in eagle_config; an fc.bias that the config does not speak of; one of zeros is none."""
    head, weights = eagle3(norm_before_fc=True, fc_bias=True)
    folder = publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U, "eagle_config": {"norm_before_fc": True}}, weights)
    same(head, bring(folder, tmp_path / "out"))
    folder = publish(tmp_path / "b", LLAMA | {"draft_vocab_size": U, "norm_before_fc": True, "bias": True},
                     weights | {"fc.bias": torch.zeros(H)})
    found = bring(folder, tmp_path / "out2")
    assert (found.config.norm_before_fc, found.config.fc_bias) == (True, False)
    export_head(tmp_path / "out2", "vllm", tmp_path / "vllm", tables())
    folder = publish(tmp_path / "c", LLAMA | {"draft_vocab_size": U, "norm_before_fc": True, "bias": False}, weights)
    with pytest.raises(RecipeError, match=r"fc\.bias is not zero"):
        bring(folder, tmp_path / "out3")


def test_published_dspark(tmp_path):
    """DeepSpec's config has its keys at the top and no dflash_config, and no d2t for a whole vocabulary."""
    head = make_head("dspark", num_layers=1, block_size=3, taps=[2, 5], mask_token_id=7, markov_rank=16, freeze_lm_head=False)
    weights = {n: t for n, t in head.state_dict().items() if n not in ("d2t", "t2d")}
    said = LLAMA | {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "target_layer_ids": [1, 4], "mask_token_id": 7, "block_size": 3,
                    "markov_rank": 16, "markov_head_type": "vanilla"}
    same(head, bring(publish(tmp_path / "a", said, weights), tmp_path / "out"))
    bare = {n: t for n, t in weights.items() if not n.startswith("confidence_head.")}
    same(head, bring(publish(tmp_path / "b", said, bare), tmp_path / "out2"))
    assert any("confidence" in f for f in read_meta(tmp_path / "out2").extra["imported"]["facts"])
    for change, words in (({"dspark_bonus_anchor": True}, "anchor"), ({"markov_head_type": "gated"}, "Markov")):
        with pytest.raises(RecipeError, match=words):
            bring(publish(tmp_path / "c", said | change, weights), tmp_path / "out3")


def test_the_tap_mutant_is_seen(tmp_path, monkeypatch):
    head, weights = eagle3(taps=[1, 3, 6])
    folder = publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U, "eagle_config": {AUX: [0, 2, 5]}}, weights)
    right = flat.tap_numbers
    monkeypatch.setattr(flat, "tap_numbers", lambda *a: [k - 1 for k in right(*a)])
    assert load_head(folder, geometry=geometry())[0].taps != head.taps


@pytest.mark.parametrize("biased", [False, True])
def test_eagle1_with_and_without_its_bias(tmp_path, biased):
    head = make_head("eagle", fc_bias=biased)
    weights = {n: t for n, t in head.state_dict().items() if n not in ("d2t", "t2d")}
    folder = publish(tmp_path / "a", LLAMA | ({} if biased else {"bias": False}), weights, "pytorch_model.bin")  # absent means true
    same(head, bring(folder, tmp_path / "out", allow_pickle=True))
    export_head(tmp_path / "out", "sglang", tmp_path / "sglang", tables())
    same(head, load_head(tmp_path / "sglang")[0])
    if biased:
        with pytest.raises(RecipeError, match=r"vLLM drops it silently: export to eagle or sglang"):
            export_head(tmp_path / "out", "vllm", tmp_path / "vllm", tables())
    else:
        export_head(tmp_path / "out", "vllm", tmp_path / "vllm", tables())


@pytest.mark.parametrize("kind", ["official", "prefixed", "vllm", "vllm shared", "pt"])
def test_medusa_in_either_naming(tmp_path, kind):
    head = make_head("medusa", medusa_num_heads=3, freeze_lm_head=kind == "vllm shared")
    to = "vllm" if kind.startswith("vllm") else "medusa_pt" if kind == "pt" else "medusa"
    export_head(checkpoint(tmp_path / "ckpt", head), to, tmp_path / "a", tables())
    if kind == "pt":
        assert (tmp_path / "a" / "medusa_lm_head.pt").is_file()
        assert not list((tmp_path / "a").glob("*.safetensors"))
        with pytest.raises(RecipeError, match="pickle"):
            load_head(tmp_path / "a")
        weights = torch.load(tmp_path / "a" / "medusa_lm_head.pt", weights_only=True)
        (tmp_path / "a" / "draftheads.json").unlink()
        same(head, bring(tmp_path / "a", tmp_path / "out", allow_pickle=True))
    else:
        weights = load_file(next((tmp_path / "a").glob("*.safetensors")))
    if kind in ("official", "prefixed"):  # the uploaded configs say 2 whatever the file holds, and nothing of sizes
        weights = {("medusa_head." if kind == "prefixed" else "") + n: t for n, t in weights.items()}
        said = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna"}
    else:
        said = json.loads((tmp_path / "a" / "config.json").read_text())
    folder = publish(tmp_path / "b", said, weights)
    same(head, bring(folder, tmp_path / "o2"))
    if kind == "official":
        assert read_meta(folder).target == "lmsys/vicuna"


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra(tmp_path, prefix):
    def official(head):
        weights = {}
        for name, tensor in head.state_dict().items():
            if name in ("d2t", "t2d"):
                continue
            if prefix and name.startswith("hydra_mlp."):
                _, i, n, rest = name.split(".", 3)
                name = f"hydra_mlp.{i}.{2 * int(n) + 1}.{rest}"
            if prefix and name.startswith("hydra_lm_head."):
                _, i, rest = name.split(".")
                name = f"hydra_lm_head.{i}.1.{rest}"
            if name.startswith("hydra_lm_head."):
                weights.setdefault(name.replace("weight", "bias"), torch.zeros(V))
            weights[name.replace("prefix_layer.", "prefix_embeding_layer.layers.0.").replace("prefix_norm.", "prefix_embeding_layer.norm.")] = tensor
        return weights

    head, biased = (make_head("hydra", hydra_num_heads=3, hydra_num_layers=2, prefix_layer=prefix, lm_head_bias=b) for b in (False, True))
    weights = official(head)
    said = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "grounded_heads": True,
            "hidden_state_offset": 0, "base_model_name_or_path": "lmsys/vicuna"}
    same(head, bring(publish(tmp_path / "a", said, weights, "hydra_lm_head.pt"), tmp_path / "out", allow_pickle=True))
    assert not load_head(tmp_path / "out")[0].config.lm_head_bias, "zeros are no bias"
    found = bring(publish(tmp_path / "b", said, official(biased)), tmp_path / "out2")
    same(biased, found)
    with torch.no_grad():
        found.hydra_lm_head[1].bias[3] += 1
    with pytest.raises(AssertionError):
        same(biased, found)


@pytest.mark.parametrize(("changes", "said"), [
    ({"hidden_size": 96}, "hidden_size 96"), ({"vocab_size": 256}, "vocab_size 256"), ({"num_attention_heads": 4}, "contradict each other"),
    ({"draft_vocab_size": 40}, "draft_vocab_size 40"), ({"attention_bias": True}, "attention_bias is true"),
    ({"bias": True}, "fc.bias is missing"), ({"norm_before_fc": True}, "missing input_norm.weight"),
    ({"norm_before_fc": True, "fc_norm": True}, "twice"),
    ({"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}}, "make them agree"),
    ({"fc_norm": True}, "missing fc_norm.0.weight"), ({"rope_parameters": {"rope_theta": 1.0}}, "make them agree"),
    ({"eagle_config": {AUX: [0, 2, 9]}}, "in 0 … 7"), ({"target_hidden_size": 128}, "target_hidden_size is 128"),
    # What would be another function, or was nothing but a word for true.
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'), ({"hidden_act": ["silu"]}, "compute silu"),
    *(({key: "false"}, f'{key} must be true or false, found "false"') for key in ("norm_before_residual", "norm_output", "fc_norm", "bias")),
    ({"eagle_config": {"norm_before_fc": 1}}, "eagle_config.norm_before_fc must be true or false"), ({"eagle_config": [1]}, "eagle_config must be"),
    *(({"rms_norm_eps": x}, "rms_norm_eps must be a number above 0") for x in (-1, 0, 1e30, True, "x", float("nan"))),
    *(({"max_position_embeddings": x}, "max_position_embeddings must be a whole number") for x in (10**30, 0, 256.5, True)),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"), ({"rope_theta": -1}, "rope_theta must be a number"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta must be a number"),
    *(({key: x}, f"{key} must be a JSON object or null") for key in ("rope_parameters", "rope_scaling") for x in (5, "x")),
    ({"quantization_config": {"quant_method": "fp8", "name": "y" * 10_000}}, "only unquantised heads"),
])
def test_a_head_that_does_not_fit_is_refused(tmp_path, changes, said):
    _, weights = eagle3()
    folder = publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U} | changes, weights)
    with pytest.raises(RecipeError) as error:
        bring(folder, tmp_path / "out")
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("same_head", [{"hidden_act": "swish"}, {"hidden_act": None, "rope_parameters": None, "rope_scaling": {}},
                                       {"norm_output": None, "bias": False, "quantization_config": None, "max_position_embeddings": None}])
def test_what_a_config_may_leave_open(tmp_path, same_head):
    head, weights = eagle3()
    same(head, bring(publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U} | same_head, weights), tmp_path / "out"))


BLOCK = {"num_layers": 1, "block_size": 4, "taps": [2, 5], "mask_token_id": 7}


def renamed_medusa(weights):
    weights["99999999.0.linear.weight"] = weights.pop("1.0.linear.weight")


def renamed_hydra(weights):
    weights["hydra_mlp.99999999.0.linear.weight"] = weights.pop("hydra_mlp.1.0.linear.weight")


@pytest.mark.parametrize(("type", "section", "to", "change", "said"), [
    ("dflash", BLOCK, "vllm", {"hidden_act": "relu"}, "compute silu"),
    ("dflash", BLOCK, "vllm", {"dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 7, "causal": "false"}}, "dflash_config.causal must be"),
    ("dflash", BLOCK, "vllm", {"tie_word_embeddings": "no"}, "must be true or false"), ("dflash", BLOCK, "vllm", {"rms_norm_eps": 0}, "above 0"),
    ("eagle", {}, "sglang", {"hidden_act": "gelu"}, "compute silu"), ("eagle", {}, "sglang", {"bias": "false"}, "bias must be true or false"),
    ("speculators", {}, "speculators", {"norm_before_residual": "false"}, "norm_before_residual must be true or false"),
    ("medusa", {}, "medusa", {"quantization_config": {"bits": 4}}, "only unquantised"),
    ("medusa", {}, "medusa", {"medusa_fc_bias": 1}, "true or false"),
    ("medusa", {}, "medusa", {"max_position_embeddings": -1}, "whole number"), ("medusa", {}, "medusa", renamed_medusa, "up to 99999999"),
    ("hydra", {"hydra_num_heads": 3, "hydra_num_layers": 1}, None, {"grounded_heads": "yes"}, "grounded_heads must be"),
    ("hydra", {"hydra_num_heads": 3, "hydra_num_layers": 1}, None, renamed_hydra, "up to 99999999"),
])
def test_other_kinds_of_heads_that_would_be_misread(tmp_path, type, section, to, change, said):
    head = make_head("eagle3" if type == "speculators" else type, **section)
    if to is None:
        weights = {n: t for n, t in head.state_dict().items() if n not in ("d2t", "t2d")}
        config = {"hydra_num_heads": 3, "hydra_num_layers": 1, "grounded_heads": True}
    else:
        export_head(checkpoint(tmp_path / "ckpt", head), to, tmp_path / "a", tables())
        weights, config = load_file(next((tmp_path / "a").glob("*.safetensors"))), json.loads((tmp_path / "a" / "config.json").read_text())
    same(head, bring(publish(tmp_path / "b", config, weights), tmp_path / "good"))
    change(weights) if callable(change) else config.update(change)
    with pytest.raises(RecipeError) as error:
        bring(publish(tmp_path / "c", config, weights), tmp_path / "out")
    assert said in str(error.value) and "\n" not in str(error.value)


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(("name", "text", "said"), [
    ("config.json", DEEP, "config.json"), ("draftheads.json", DEEP, "draftheads.json"), ("model.safetensors.index.json", DEEP, "index.json"),
    *(("model.safetensors.index.json", json.dumps({"weight_map": x}), "weight_map must give") for x in ([1], {"a": ["x"]}, {"a": 1}, None, {})),
])
def test_json_of_another_shape_is_bad_input(tmp_path, name, text, said):
    folder = publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U}, eagle3()[1])
    (folder / name).write_text(text)
    # load_head knows a head of another tool by what these files hold, and may see none here.
    for load, words in ((lambda: bring(folder, tmp_path / "out"), said), (lambda: load_head(folder, geometry=geometry()), str(folder))):
        with pytest.raises(RecipeError) as error:
            load()
        assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


def raw_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"fc.weight": Evil("/nowhere/at/all")}))


@pytest.mark.parametrize("change", [
    lambda w: w.to_sparse(), lambda w: w.to_sparse_csr(), lambda w: w.to("meta"), lambda w: torch.zeros(1).expand(10**13),
    lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), lambda w: w.to(torch.float8_e4m3fn), raw_pickle,
], ids=["sparse", "csr", "meta", "expand", "quantised", "fp8", "raw"])
@pytest.mark.filterwarnings("ignore")  # torch's, while the file is made
def test_tensors_that_are_none_are_refused_without_a_warning(tmp_path, change, recwarn):
    _, weights = eagle3()
    folder = publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U}, weights, "pytorch_model.bin")
    if change is raw_pickle:
        raw_pickle(folder / "pytorch_model.bin")
    else:
        torch.save(weights | {"fc.weight": change(weights["fc.weight"].detach())}, folder / "pytorch_model.bin")
    recwarn.clear()
    warnings.simplefilter("always")
    with pytest.raises(RecipeError, match=r"fc\.weight|was refused") as error:
        bring(folder, tmp_path / "out", allow_pickle=True)
    assert "safetensors" in str(error.value) or "download it again" in str(error.value)
    assert not [str(w.message) for w in recwarn]


def test_errors_stay_short_and_say_what_to_do(tmp_path):
    _, weights = eagle3()
    good = LLAMA | {"draft_vocab_size": U}
    many = {f"mystery.{i}": torch.ones(1) for i in range(300)}
    for change in (many, {"x" * 20_000: torch.ones(1)}, {"norm.weight": torch.full((H,), float("nan"))}):
        with pytest.raises(RecipeError, match="download") as error:
            bring(publish(tmp_path / "a", good, weights | change), tmp_path / "out")
        assert len(str(error.value)) < 800
    with pytest.raises(RecipeError, match=r"missing fc\.weight.*download"):
        bring(publish(tmp_path / "b", good, {n: t for n, t in weights.items() if n != "fc.weight"}), tmp_path / "out")
    with pytest.raises(RecipeError, match="no draft head") as error:
        bring(publish(tmp_path / "c", {"model_type": "bert"}, many), tmp_path / "out")
    assert len(str(error.value)) < 800


def test_a_pickle_that_export_wrote_can_be_imported(tmp_path):
    """With what draftheads.json says of it, and its target's adapter: the target of this head is the tuned one."""
    head = make_head("medusa", medusa_num_heads=3)
    files = ("adapter_config.json", "adapter_model.safetensors")
    meta = HeadMeta(target=str(tmp_path / "target"), template_hash="abcd", metrics={"tau": 1.5})
    save_head(head, tmp_path / "ckpt", meta, lambda place: [(place / name).write_text(name) for name in files])
    export_head(tmp_path / "ckpt", "medusa_pt", tmp_path / "pt", tables())
    with pytest.raises(RecipeError, match="--allow-pickle"):
        bring(tmp_path / "pt", tmp_path / "out")
    with pytest.raises(RecipeError, match="made for another target"):
        bring(tmp_path / "pt", tmp_path / "out", geometry(num_layers=9), allow_pickle=True)
    same(head, bring(tmp_path / "pt", tmp_path / "out", allow_pickle=True))
    found = read_meta(tmp_path / "out")
    assert (found.target, found.template_hash, found.metrics, found.layout) == ("org/model", "abcd", {"tau": 1.5}, None)
    assert found.adapter == read_meta(tmp_path / "ckpt").adapter and set(found.adapter) == set(files)
    assert all((tmp_path / "out" / "adapter" / name).read_text() == name for name in files)
    bring(tmp_path / "pt", tmp_path / "out", allow_pickle=True)  # and again, over it
    (tmp_path / "pt" / "medusa_lm_head.pt").write_bytes((tmp_path / "pt" / "medusa_lm_head.pt").read_bytes() + b"x")
    with pytest.raises(RecipeError):
        bring(tmp_path / "pt", tmp_path / "out2", allow_pickle=True)


@pytest.mark.parametrize(("type", "to", "others"), [("medusa", "sglang", "medusa, medusa_pt, vllm"), ("eagle3", "medusa", "eagle, sglang, "),
                                                    ("peagle", "eagle", "vllm"), ("hydra", "vllm", None)])
def test_a_refusal_names_the_layouts_that_take_such_a_head(tmp_path, type, to, others):
    with pytest.raises(RecipeError, match=f"has no layout for a {type} head") as error:
        export_head(checkpoint(tmp_path / "ckpt", make_head(type)), to, tmp_path / "out", tables())
    assert (f"choose another --to ({others}" if others else "no layout takes one: draft with it here") in str(error.value)
    assert "hydra," not in str(error.value) and "\n" not in str(error.value)
    assert set(head_types()) - {"hydra"} == {kind for name in FORMATS for kind in getattr(layout(name), "TAKES", ())}


def test_damaged_and_unknown_files_are_refused(tmp_path):
    _, weights = eagle3()
    good = LLAMA | {"draft_vocab_size": U}

    def refused(folder: Path, **options) -> str:
        with pytest.raises(RecipeError) as error:
            bring(folder, tmp_path / "out", **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    cut = publish(tmp_path / "cut", good, weights)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    assert "cut short" in refused(cut)
    cut = publish(tmp_path / "cutpt", good, weights, "pytorch_model.bin")
    (cut / "pytorch_model.bin").write_bytes((cut / "pytorch_model.bin").read_bytes()[:5000])
    assert "cut short" in refused(cut, allow_pickle=True)
    assert "unknown mystery" in refused(publish(tmp_path / "more", good, weights | {"mystery": torch.ones(3)}))
    assert "missing norm.weight" in refused(publish(tmp_path / "less", good, {n: t for n, t in weights.items() if n != "norm.weight"}))
    assert "no draft head" in refused(publish(tmp_path / "none", {"model_type": "bert"}, {"a": torch.ones(2)}))
    assert "no config.json" in refused(tmp_path)
    assert "give the folder of a head, or a Hub id" in refused(tmp_path / "nowhere")
    assert "outside 0 … 127" in refused(publish(tmp_path / "abs", good, weights | {"d2t": weights["d2t"] + 100}))
    folder = publish(tmp_path / "shards", good, weights)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../cut/model.safetensors"}}))
    assert "outside its folder" in refused(folder)


@pytest.mark.parametrize("kind", ["eagle3", "speculators", "eagle", "medusa", "hydra", "dflash"])
def test_nonsense_in_a_config_is_bad_input(tmp_path, kind):
    """Whatever a key holds: the same head, or one line."""
    if kind == "hydra":
        weights = {n: t for n, t in make_head("hydra", hydra_num_heads=2).state_dict().items() if n not in ("d2t", "t2d")}
        said = {"hydra_num_heads": 2, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    else:
        sections = {"medusa": {"medusa_num_heads": 2}, "dflash": {"num_layers": 1, "block_size": 4, "taps": [2, 5]}, "eagle": {}}
        section = sections.get(kind, {"draft": U})
        type = "eagle3" if kind == "speculators" else kind
        to = {"eagle3": "vllm", "eagle": "sglang", "dflash": "vllm"}.get(kind, kind)
        export_head(checkpoint(tmp_path / "ckpt", make_head(type, **section)), to, tmp_path / "a", tables())
        weights, said = load_file(next((tmp_path / "a").glob("*.safetensors"))), json.loads((tmp_path / "a" / "config.json").read_text())
    folder, refused = publish(tmp_path / "b", said, weights), []
    load_head(folder, geometry=geometry())
    for key in said:
        for value in (None, "x", -1, [], ["y"], {"rope_theta": "z"}):
            (folder / "config.json").write_text(json.dumps(said | {key: value}))
            try:
                load_head(folder, geometry=geometry())
            except RecipeError as error:
                refused.append(str(error))
    assert len(refused) > 10
    assert not [line for line in refused if "\n" in line]


def test_heads_for_other_targets_and_missing_ones(tmp_path):
    export_head(checkpoint(tmp_path / "m", make_head("medusa", medusa_num_heads=2)), "medusa", tmp_path / "a", tables())
    weights = load_file(tmp_path / "a" / "medusa_lm_head.safetensors")
    official = publish(tmp_path / "b", {"medusa_num_heads": 2, "medusa_num_layers": 1}, weights)  # says nothing of sizes: the tensors do
    for change, said in (({"hidden_size": 96}, "hidden size of 64"), ({"vocab_size": 256}, "the target's vocabulary is 256")):
        with pytest.raises(RecipeError, match=said):
            import_head(str(official), tmp_path / "out", "org/model", geometry(**change))
    with pytest.raises(RecipeError, match="cannot get org/none from the Hub"):
        import_head("org/none", tmp_path / "out", "org/model", geometry())
    with pytest.raises(RecipeError, match="no tensors of Medusa heads"):
        import_head(str(publish(tmp_path / "c", LLAMA, eagle3()[1])), tmp_path / "out", "org/model", geometry(), from_="medusa")
    with pytest.raises(RecipeError, match="it is ours already"):
        import_head(str(tmp_path / "a"), tmp_path / "out", "org/model", geometry())
    with pytest.raises(RecipeError, match="its target must be given"):
        load_head(official)


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_malicious_pickle_is_never_run(tmp_path):
    folder = publish(tmp_path / "a", LLAMA | {"draft_vocab_size": U}, {"fc.weight": torch.ones(1)})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil(str(tmp_path / "owned"))}, folder / "pytorch_model.bin")
    for allowed, said in ((False, "--allow-pickle"), (True, "was refused")):
        with pytest.raises(RecipeError, match=said):
            bring(folder, tmp_path / "out", allow_pickle=allowed)
    with pytest.raises(RecipeError, match="pickle"):
        load_head(folder, geometry=geometry())
    assert not (tmp_path / "owned").exists()


def test_every_layout_is_read_and_found():
    assert {"vllm", "sglang", "trtllm", "speculators", "eagle", "medusa", "medusa_pt", "hydra"} == set(FORMATS)
    assert all(callable(layout(name).read) for name in FORMATS)
    with pytest.raises(RecipeError, match="did you mean 'speculators'"):
        layout("speculator")
    assert speculators.target_of({}) is None


# ---- the commands


def specdec(*words: object) -> int:
    return cli.guard("specdec", lambda: cli.app([str(w) for w in words], standalone_mode=False, prog_name="specdec"))


def test_commands_export_import_and_evaluate(tmp_path, capsys):
    target = Target.load(str(tiny.save(tmp_path / "tiny", num_hidden_layers=8)))
    torch.manual_seed(0)
    head = build_head({"type": "eagle3", "draft_vocab_size": 64}, target.geometry, torch.arange(4, 68))
    save_head(head, tmp_path / "run" / "ckpt" / "final", HeadMeta(target=target.name, template_hash=target.template_hash))
    lines = [{"id": f"p{i}", "category": "copy", "messages": [{"role": "user", "content": "abcabc"}]} for i in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"target": {"name": target.name}, "head": {"type": "eagle3"}, "eval": {"max_new_tokens": 6, "bootstrap": 100}}
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert specdec("export", "--ckpt", tmp_path / "run", "--to", "vllm", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    exported = tmp_path / "run" / "export" / "vllm"
    assert (report["folder"], report["layout"], report["difference"]) == (str(exported), "vllm", 0.0)
    assert specdec("export", "--ckpt", tmp_path / "run", "--to", "speculators", "--out", tmp_path / "spec") == 0
    assert "read back with the same logits" in capsys.readouterr().out

    # Evaluated as it is, its target read from the run; then as another tool would publish it, with the target named.
    words = ["--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 6, "--gamma", 2, "--transformers", 0, "--drafters", "none,head", "--json"]
    assert specdec("eval", "--ckpt", exported, *words) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["lossless"]
    assert (exported / "report" / "report.json").is_file() and not (tmp_path / "run" / "report").exists()
    assert specdec("eval", "--ckpt", tmp_path / "spec", *words) == 2
    assert "--set target.name=NAME" in capsys.readouterr().err
    (tmp_path / "spec" / "draftheads.json").unlink()
    opened = subject.open_checkpoint(tmp_path / "spec", [f"target.name={target.name}"])
    drafter = subject.load_drafters(opened, target, ["head"])["head"]
    assert isinstance(drafter, HeadDrafter) and drafter.taps == head.taps

    assert specdec("import", "--ckpt", tmp_path / "spec", "--target", tmp_path / "tiny", "--out", tmp_path / "in", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "speculators"
    again, _ = load_head(tmp_path / "in", geometry=target.geometry)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for words, said in (
        (["export", "--ckpt", tmp_path / "run", "--to", "vlm"], "did you mean 'vllm'"),
        (["export", "--ckpt", tmp_path / "run", "--to", "vllm", "--dtype", "int4"], "--dtype is 'int4'"),
        (["import", "--ckpt", tmp_path / "nowhere", "--target", tmp_path / "tiny", "--out", tmp_path / "x"], "no folder at"),
        (["import", "--ckpt", tmp_path / "spec", "--from", "egle", "--target", "x", "--out", tmp_path / "x"], "did you mean 'eagle'"),
    ):
        assert specdec(*words) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gemma3_text", {})])
def test_the_targets_tables_are_read_alone(tmp_path, family, changes):
    folder = tiny.save(tmp_path / "tiny", family, **changes)
    target = Target.load(str(folder), packed=False)
    embed_VD, lm_head_VD, found = read_tables(str(folder), geometry=target.geometry)
    assert torch.equal(embed_VD, target.embed_VD) and torch.equal(lm_head_VD, target.lm_head_VD)
    assert found == target.geometry and embed_VD.dtype == target.dtype
    with pytest.raises(RecipeError, match="hidden_size"):
        read_tables(str(folder), geometry=target.geometry.model_copy(update={"hidden_size": 96}))
    # In shards, of which only those with the two tables are there.
    model = target.model
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index[n] for n in index if index[n] and ("embed" in n or n == "lm_head.weight")}
    for file in set(index.values()) - needed:
        (tmp_path / "shards" / file).unlink()
    assert len(needed) < len(set(index.values()))
    again = read_tables(str(tmp_path / "shards"))
    assert torch.equal(again[0], embed_VD) and torch.equal(again[1], lm_head_VD)
    # What the files do not hold by that name is left to the loader.
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if "embed" in n)
    save_file({(f"{n}.odd" if n == name else n): t for n, t in weights.items()}, folder / "model.safetensors")
    assert read_tables(str(folder)) is None
    assert read_tables(str(tiny.save(tmp_path / "neox", "gpt_neox"))) is None, "transformers renames its lm_head as it loads"


def test_export_loads_no_target(tmp_path, capsys, monkeypatch):
    target = Target.load(str(tiny.save(tmp_path / "tiny", num_hidden_layers=8)))
    head = build_head({"type": "eagle3", "draft_vocab_size": 64}, target.geometry, torch.arange(4, 68))
    save_head(head, tmp_path / "ckpt", HeadMeta(target=target.name, template_hash=target.template_hash))
    words = ["export", "--ckpt", tmp_path / "ckpt", "--to", "speculators", "--out"]
    with monkeypatch.context() as patch:
        patch.setattr("draftheads.inference.tables.read_tables", lambda *a, **k: None)
        assert specdec(*words, tmp_path / "whole") == 0
    monkeypatch.setattr(Target, "load", lambda *a, **k: pytest.fail("the whole target"))
    assert specdec(*words, tmp_path / "alone") == 0
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "alone" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("command", ["export", "import"])
def test_help_teaches_by_example(command, capsys):
    assert specdec(command, "--help") == 0
    assert f"specdec {command} --ckpt" in capsys.readouterr().out
