"""The checkpoint folder: exact round trip, no tying, and one clear line for everything that does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, load_head, read_meta, save_head
from draftheads.heads.vocab import build_draft_vocab
from draftheads.inference.checkpoints import find_folder
from draftheads.inference.target import Target
from draftheads.recipes.files import recover_folder
from draftheads.recipes.schema import RecipeError

META = HeadMeta(target="tiny", revision="r1", template_hash="abcd", recipe_hash="ef01", data_hash="2345", metrics={"tau": 1.5})


@pytest.fixture(scope="module")
def target() -> Target:
    """Tied embeddings, 128 lm_head rows, a tokenizer of 100."""
    return Target.from_model(tiny.model("llama", num_hidden_layers=8, tie_word_embeddings=True), tiny.tokenizer(100))


def make(target: Target, **section):
    ids_U = build_draft_vocab(torch.arange(128).flip(0), 32, required=target.eos_ids, forbidden=range(len(target.tokenizer), 128))
    head = build_head({"type": "eagle3", "draft_vocab_size": 32} | section, target.geometry, ids_U)
    head.borrow(target.embed_VD, target.lm_head_VD)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    return head


@pytest.mark.parametrize("freeze", [True, False])
def test_round_trip_with_a_tied_target_and_a_reduced_vocabulary(target, tmp_path, freeze):
    head = make(target, freeze_lm_head=freeze)
    save_head(head, tmp_path / "a", META)
    loaded, meta = load_head(tmp_path / "a", geometry=target.geometry, template_hash="abcd")
    loaded.borrow(target.embed_VD, target.lm_head_VD)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), head.state_dict().values(), strict=True))
    assert loaded.lm_head.weight.shape == (32, 64)
    assert torch.equal(loaded.lm_head.weight, head.lm_head.weight)
    assert meta.target == "tiny"
    assert meta.taps == (2, 4, 5)
    assert meta.metrics == {"tau": 1.5}
    assert meta.geometry == target.geometry
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == 32
    assert config["freeze_lm_head"] is freeze
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    saved = load_file(tmp_path / "a" / "model.safetensors")
    assert ("lm_head.weight" in saved) is not freeze
    assert not any("embed" in name for name in saved)
    # The same head again: the same bytes. And over an existing folder.
    save_head(loaded, tmp_path / "b", META)
    save_head(loaded, tmp_path / "b", META)
    for name in ("config.json", "model.safetensors", "draftheads.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_names_and_shapes_are_the_engines(target):
    shapes = {name: tuple(t.shape) for name, t in make(target, freeze_lm_head=False).state_dict().items()}
    H, D, Q, K, inner = 64, 16, 4, 2, 96
    assert shapes == {
        "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (32, H), "d2t": (32,), "t2d": (128,),
        "midlayer.hidden_norm.weight": (H,), "midlayer.input_layernorm.weight": (H,), "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (Q * D, 2 * H), "midlayer.self_attn.k_proj.weight": (K * D, 2 * H),
        "midlayer.self_attn.v_proj.weight": (K * D, 2 * H), "midlayer.self_attn.o_proj.weight": (H, Q * D),
        "midlayer.mlp.gate_proj.weight": (inner, H), "midlayer.mlp.up_proj.weight": (inner, H), "midlayer.mlp.down_proj.weight": (H, inner),
        **{f"fc_norm.{i}.weight": (H,) for i in range(3)},
    }


def refused(folder, **arguments) -> str:
    with pytest.raises(RecipeError) as error:
        load_head(folder, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_target_is_refused(target, tmp_path):
    save_head(make(target), tmp_path / "a", META)
    other = target.geometry.model_copy(update={"num_layers": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}})
    message = refused(tmp_path / "a", geometry=other)
    assert "num_layers 8 ≠ 9" in message
    assert "rope_theta" in message
    message = refused(tmp_path / "a", template_hash="other")
    assert "abcd" in message
    assert "other" in message
    load_head(tmp_path / "a", template_hash=None)


def test_readers_leave_a_writers_work_in_progress_alone(target, tmp_path):
    """Between atomic_folder's two renames: `final` is set aside, the new one is a .part. A reader reads the older one and moves nothing."""
    final, part = tmp_path / "ckpt" / "final", tmp_path / "ckpt" / ".final.abc.part"
    save_head(make(target), final, META)
    final.rename(final.parent / ".final.old")
    part.mkdir()
    assert read_meta(final).target == load_head(final)[1].target == read_meta(find_folder(tmp_path)).target == META.target
    assert sorted(p.name for p in final.parent.iterdir()) == [".final.abc.part", ".final.old"]
    recover_folder(final)
    assert [p.name for p in final.parent.iterdir()] == ["final"]


def test_damaged_folders_are_refused(target, tmp_path):
    def fresh(change_tensors=None, meta=None, config=None):
        save_head(make(target), tmp_path / "x", META)
        if change_tensors:
            tensors = load_file(tmp_path / "x" / "model.safetensors")
            change_tensors(tensors)
            save_file(tensors, tmp_path / "x" / "model.safetensors")
        for name, change in (("draftheads.json", meta), ("config.json", config)):
            if change:
                raw = json.loads((tmp_path / "x" / name).read_text())
                change(raw)
                (tmp_path / "x" / name).write_text(json.dumps(raw))
        return tmp_path / "x"

    assert "missing fc.weight" in refused(fresh(lambda t: t.pop("fc.weight")))
    assert "unknown lm_head.weight" in refused(fresh(lambda t: t.update({"lm_head.weight": torch.zeros(32, 64)})))
    assert "norm.weight is (63,)" in refused(fresh(lambda t: t.update({"norm.weight": torch.zeros(63)})))
    assert "holds NaN" in refused(fresh(lambda t: t["norm.weight"].fill_(float("nan"))))
    assert "d2t" in refused(fresh(lambda t: t.pop("d2t")))
    assert "different runs" in refused(fresh(lambda t: t["d2t"].add_(1)))
    assert "t2d" in refused(fresh(lambda t: t.update(t2d=~t["t2d"])))
    assert "norm_output" in refused(fresh(config=lambda c: c.update(norm_output=False)))
    assert "fc_norm.0.weight" in refused(fresh(meta=lambda m: m["head"].update(fc_norm=False), config=lambda c: c.update(fc_norm=False)))
    assert "upgrade" in refused(fresh(meta=lambda m: m.update(format=2)))
    assert "whole number" in refused(fresh(meta=lambda m: m.update(format="1.0")))
    assert "whole number" in refused(fresh(meta=lambda m: m.update(format=None)))
    assert "geometry" in refused(fresh(meta=lambda m: m.pop("geometry")))
    assert "did you mean" in refused(fresh(meta=lambda m: m.update(metricz=1)))
    broken = fresh()
    (broken / "model.safetensors").write_bytes(b"nothing")
    assert "cannot read" in refused(broken)
    (broken / "draftheads.json").write_text("{")
    assert "cannot read" in refused(broken)
    assert "not a draftheads checkpoint" in refused(tmp_path / "nowhere")
    with pytest.raises(RecipeError):
        read_meta(tmp_path)


@pytest.mark.parametrize("name", ["draftheads.json", "config.json"])
def test_json_nested_without_end_is_bad_input(target, tmp_path, name):
    save_head(make(target), tmp_path / "a", META)
    (tmp_path / "a" / name).write_text("[" * 100_000)
    assert f"cannot read {tmp_path / 'a' / name}" in refused(tmp_path / "a")


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e4m3fn)}), "norm.weight is torch.float8_e4m3fn, wanted floating-point"),
    (lambda t: t["norm.weight"].fill_(float("inf")), "norm.weight holds NaN or infinity: copy or download it again"),
    (lambda t: t.pop("norm.weight"), "copy or download them again"),
    (lambda t: t.update({"x" * 20_000: torch.ones(1)}), "unknown xxx"),
    (lambda t: t.update({f"x{i}": torch.ones(1) for i in range(3000)}), "and 2995 more"),
])
def test_tensors_that_do_not_fit_are_told_shortly(target, tmp_path, change, said):
    save_head(make(target), tmp_path / "a", META)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    message = refused(tmp_path / "a")
    assert said in message and len(message) < 800


def test_a_checkpoint_from_before_an_option_opens(target, tmp_path):
    """Files as they were written before EAGLE-3 knew norm_before_fc and norm_before_residual: what is not there is off. What is on must be there."""
    head = make(target)
    save_head(head, tmp_path / "a", META)
    config, said = (json.loads((tmp_path / "a" / name).read_text()) for name in ("config.json", "draftheads.json"))
    for key in ("norm_before_fc", "fc_bias", "norm_before_residual"):
        config.pop(key, None), said["head"].pop(key, None), config["eagle_config"].pop(key, None)
    said.pop("adapter")
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (tmp_path / "a" / "draftheads.json").write_text(json.dumps(said))
    loaded, _ = load_head(tmp_path / "a", geometry=target.geometry)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), head.state_dict().values(), strict=True))
    (tmp_path / "a" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "norm_output"}))
    with pytest.raises(RecipeError, match="norm_output is None"):
        load_head(tmp_path / "a", geometry=target.geometry)
