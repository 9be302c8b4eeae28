"""The front door: generate, SpeculativeDecoder, streaming text."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mtp import needs_mtp

import draftheads.inference as inference
import tiny
from draftheads.eval.lossless import UNEXPLAINED, compare
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, save_head
from draftheads.inference import Limits, Sampling, SpeculativeDecoder, Target, generate
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.suffix import SuffixDrafter
from draftheads.inference.options import resolve
from draftheads.inference.shapes import Static
from draftheads.inference.text import TextStream, final_text
from draftheads.recipes.schema import RecipeError

PROMPTS = ["Hello there", [{"role": "user", "content": "What is it?"}], [40, 41, 42, 43]]


def byte_tokenizer():  # type: ignore[no-untyped-def]
    """One token a byte, so that most characters of a text are unfinished for a while."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


BYTES = byte_tokenizer()


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.sampled_from("ab é€😀\n中"), max_size=25), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
       stops=st.lists(st.text(st.sampled_from("ab é😀"), min_size=1, max_size=3), max_size=2))
def test_streamed_pieces_join_to_the_final_text(text: str, sizes: list[int], stops: list[str]) -> None:
    tokens = BYTES(text)["input_ids"] if text else []
    stream, pieces, at, i = TextStream(BYTES, stops), [], 0, 0
    while at < len(tokens):
        size = sizes[i % len(sizes)]
        pieces.append(stream.push(tokens[at : at + size]))
        at, i = at + size, i + 1
    assert not any("\ufffd" in p for p in pieces)
    assert "".join([*pieces, stream.finish()]) == final_text(BYTES, tokens, stops)


def test_an_answer_cut_inside_a_character_shows_what_there_is() -> None:
    tokens = BYTES("a😀")["input_ids"][:-1]
    stream = TextStream(BYTES)
    assert stream.push(tokens) == "" or "\ufffd" not in stream.push([])
    assert final_text(BYTES, tokens).startswith("a\ufffd")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target's folder and a run folder with an untrained head for it."""
    root = tmp_path_factory.mktemp("api")
    folder = tiny.save(root / "target")
    target = Target.load(str(folder))
    torch.manual_seed(0)
    head = build_head({"type": "eagle3", "taps": [1, 2, 3]}, target.geometry)
    save_head(head, root / "run" / "ckpt" / "final", HeadMeta(target=str(folder), template_hash=target.template_hash))
    return folder, root / "run"


def test_a_checkpoint_finds_the_chat_template_it_was_trained_with(tmp_path: Path) -> None:
    folder, run, jinja = tiny.save(tmp_path / "target", template=None), tmp_path / "run", tmp_path / "chat.jinja"
    jinja.write_text(tiny.CHATML)
    target = Target.load(str(folder), chat_template=str(jinja))
    head = build_head({"type": "eagle3", "taps": [1, 2, 3]}, target.geometry)
    save_head(head, run / "ckpt" / "final", HeadMeta(target=str(folder), template_hash=target.template_hash))
    with pytest.raises(RecipeError, match="chat_template=PATH"):
        SpeculativeDecoder.from_checkpoint(run)
    assert SpeculativeDecoder.from_checkpoint(run, chat_template=jinja).target.template_hash == target.template_hash
    (run / "recipe.yaml").write_text(f"target: {{chat_template: {jinja}}}")
    assert SpeculativeDecoder.from_checkpoint(run).target.template_hash == target.template_hash
    moved = jinja.rename(tmp_path / "moved.jinja")
    with pytest.raises(RecipeError, match="chat.jinja, which is not there; .*chat_template=PATH"):
        SpeculativeDecoder.from_checkpoint(run)
    assert SpeculativeDecoder.from_checkpoint(run, chat_template=moved).target.template_hash == target.template_hash


def test_generate_gives_the_same_text_with_any_draft(checkpoint: tuple[Path, Path]) -> None:
    folder, run = checkpoint
    model, tokenizer = tiny.model(), tiny.tokenizer()
    for temperature in (0.0, 0.8):
        plain = generate(model, tokenizer, PROMPTS, max_new_tokens=20, temperature=temperature, seed=3)
        assert len(plain) == 3 and all(isinstance(t, str) for t in plain)
        copied = generate(model, tokenizer, PROMPTS, draft="ngram", max_new_tokens=20, temperature=temperature, seed=3, batch_size=2)
        assert copied == plain == generate(model, tokenizer, PROMPTS, draft=NgramDrafter(1, 2), max_new_tokens=20, temperature=temperature, seed=3)
    plain = generate(str(folder), prompts=PROMPTS, max_new_tokens=20)
    for options in ({}, {"copy_first": "ngram"}, {"copy_first": "suffix"}, {"tree": "dynamic:depth=3,top_k=2,nodes=5"}, {"batch_size": 3}):
        assert generate(str(folder), prompts=PROMPTS, draft=run, max_new_tokens=20, **options) == plain  # type: ignore[arg-type]
    full = generate(str(folder), prompts=PROMPTS, draft=str(run / "ckpt" / "final"), max_new_tokens=20, return_completions=True)
    assert [c.text for c in full] == plain and any(r.source == "head" for r in full[0].rounds)  # type: ignore[union-attr]


def test_a_checkpoint_is_enough_to_stream(checkpoint: tuple[Path, Path]) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(checkpoint[1])
    for sampling in (Sampling(), Sampling(0.9, top_k=20)):
        (whole,) = decoder.complete([PROMPTS[1]], sampling, Limits(30, 128), seed=1)
        assert "".join(decoder.stream(PROMPTS[1], sampling, Limits(30, 128), seed=1)) == whole.text == decoder.last.text  # type: ignore[union-attr]
        assert decoder.last is not None and decoder.last.tokens == whole.tokens and decoder.last.rounds


def drafts(folder: Path, run: Path) -> dict[str, dict[str, Any]]:
    """Everything that `draft` and what belongs to it may be. (An untrained head, and models that agree with the target now and then.)"""
    other = tiny.model(seed=1, num_hidden_layers=1)
    return {
        "suffix": {"draft": "suffix"}, "suffix drafter": {"draft": SuffixDrafter(min_token_prob=0.0)}, "model": {"draft": other},
        "own tokenizer": {"draft": other, "draft_tokenizer": tiny.tokenizer()}, "model folder": {"draft": folder, "copy_first": "suffix"},
        "target": {"draft": Target.from_model(other, tiny.tokenizer()), "tree": Static(((0,), (1,), (0, 0)))},
        "itself": {"draft": folder, "tree": "dynamic:depth=3,top_k=2,nodes=5", "gamma": 2},
        "sampled tree": {"draft": folder, "tree": "sampled:2,1"}, "head": {"draft": run, "tree": "static:0;1;0,0"},
        "copies, head": {"draft": run / "ckpt" / "final", "copy_first": "ngram", "tree": "dynamic:depth=2,top_k=2,nodes=4"},
    }


def test_every_draft_leaves_the_text_as_it_is(checkpoint: tuple[Path, Path]) -> None:
    folder, run = checkpoint
    model, tokenizer = Target.load(str(folder)), None
    options: dict[str, Any] = {"max_new_tokens": 16, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
    plain = generate(model, tokenizer, PROMPTS, **options)
    accepted = {}
    for name, draft in drafts(folder, run).items():
        found = generate(model, tokenizer, PROMPTS, batch_size=2, return_completions=True, **draft, **options)
        assert [c.text for c in found] == plain, name  # type: ignore[union-attr]
        accepted[name] = sum(r.accepted for c in found for r in c.rounds)  # type: ignore[union-attr]
        decoder = SpeculativeDecoder(model, draft["draft"], **{k: v for k, v in draft.items() if k != "draft"})
        pieces = decoder.stream(PROMPTS[0], Sampling(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=4), Limits(16, 64))
        assert "".join(pieces) == plain[0], name
    # The target is its own draft there; a draft knows no processors, so some of what it proposes is refused.
    assert accepted["itself"] > 20


@needs_mtp
def test_the_targets_own_layers_draft(tmp_path: Path) -> None:
    from test_mtp import mellum

    folder = str(mellum(tmp_path))
    plain = generate(folder, prompts=PROMPTS, max_new_tokens=12)
    for options in ({}, {"copy_first": "suffix"}, {"tree": "dynamic:depth=2,top_k=2,nodes=4"}):
        found = generate(folder, prompts=PROMPTS, draft="mtp", max_new_tokens=12, return_completions=True, **options)  # type: ignore[arg-type]
        assert [c.text for c in found] == plain and any(r.source == "mtp" for c in found for r in c.rounds)  # type: ignore[union-attr]


def test_typical_acceptance_is_lossy_but_not_when_greedy(checkpoint: tuple[Path, Path]) -> None:
    folder, _ = checkpoint
    loose: dict[str, Any] = {"draft": tiny.model(seed=1), "max_new_tokens": 24, "lossy": "typical", "typical_epsilon": 0.001, "typical_alpha": 0.01}
    assert generate(str(folder), prompts=PROMPTS, **loose) == generate(str(folder), prompts=PROMPTS, max_new_tokens=24)
    strict = {k: v for k, v in loose.items() if k in ("draft", "max_new_tokens")}
    taus = [sum(len(c.tokens) for c in done) / sum(len(c.rounds) for c in done)  # type: ignore[union-attr]
            for done in (generate(str(folder), prompts=PROMPTS, temperature=1.0, return_completions=True, **o) for o in (loose, strict))]
    assert taus[0] > 1.5 * taus[1]


# ---- a GenerationConfig


@pytest.mark.parametrize("values", [
    {"repetition_penalty": 1.4, "max_new_tokens": 14}, {"no_repeat_ngram_size": 1, "max_new_tokens": 14}, {"max_length": 17},
    {"min_new_tokens": 9, "eos_token_id": [70, 45, 2], "max_new_tokens": 14}, {"eos_token_id": 70, "max_new_tokens": 24, "top_k": 5, "num_beams": 1},
], ids=lambda v: next(iter(v)))
def test_a_generation_config_means_what_it_means_to_transformers(values: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    model, tokenizer = tiny.model(), tiny.tokenizer()
    config = GenerationConfig(**{"eos_token_id": 2, "pad_token_id": 3, "bos_token_id": 1} | values)
    for prompt in ("abcabc", "Hello"):
        ids = tokenizer([prompt], return_tensors="pt").input_ids
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, ids.shape[1] :].tolist()
        plain = generate(model, tokenizer, [prompt], max_new_tokens=24, return_completions=True)[0].tokens  # type: ignore[union-attr]
        assert expected != plain, "an option that changes nothing proves nothing"
        ours = {k: v for k, v in values.items() if k in ("repetition_penalty", "no_repeat_ngram_size", "max_new_tokens")}
        options: list[dict[str, Any]] = [{"generation_config": config}, *([ours] if ours == values else [])]
        for arguments, draft in itertools.product(options, (None, "ngram")):
            (found,) = generate(model, tokenizer, [prompt], draft=draft, return_completions=True, **arguments)
            assert found.tokens == expected  # type: ignore[union-attr]


def test_arguments_beat_the_generation_config() -> None:
    from transformers import GenerationConfig

    given = {"temperature": None, "top_p": None, "max_new_tokens": None, "max_len": None, "stop_strings": None}
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=7, stop_strings=["x"], min_p=0.05)
    found = resolve(given, config)
    assert found.sampling == Sampling(0.6, top_k=50, top_p=0.9, min_p=0.05)  # transformers' own top_k, where none is given
    assert (found.max_new_tokens, found.max_len, found.stop_strings, found.eos_ids) == (7, None, ("x",), None)
    found = resolve(given | {"temperature": 0.0, "top_p": 0.5, "max_new_tokens": 3, "stop_strings": ["y", "z"]}, config)
    assert (found.sampling.temperature, found.sampling.top_p, found.max_new_tokens, found.stop_strings) == (0.0, 0.5, 3, ("y", "z"))
    assert resolve(given, GenerationConfig(temperature=0.6)).sampling.temperature == 0.0  # without do_sample, transformers is greedy
    assert resolve(given | {"max_new_tokens": 3}, GenerationConfig(max_length=30)).max_len is None
    assert resolve(given).max_new_tokens == 128


def test_what_a_generation_config_cannot_have_is_refused_by_name_before_anything_runs() -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(typical_p=0.9, epsilon_cutoff=0.1, encoder_repetition_penalty=1.2, bad_words_ids=[[5]], num_beams=3, min_length=4,
                              sequence_bias=[[[5], 1.0]], output_scores=True, num_return_sequences=2, repetition_penalty=1.1, use_cache=False)
    with pytest.raises(RecipeError) as caught:
        generate(tiny.model(), tiny.tokenizer(), ["ab"], generation_config=config)
    said = str(caught.value)
    for name in ("typical_p=0.9", "epsilon_cutoff", "encoder_repetition_penalty", "bad_words_ids", "num_beams=3", "min_length", "sequence_bias",
                 "output_scores", "num_return_sequences"):
        assert name in said.partition("; take it out")[0]
    assert "repetition_penalty=1.1" not in said and "use_cache" not in said.partition("(")[0] and "\n" not in said
    with pytest.raises(RecipeError, match="generation_config is a dict"):
        generate(tiny.model(), tiny.tokenizer(), ["ab"], generation_config={"top_k": 3})
    harmless = GenerationConfig(typical_p=1.0, num_beams=1, suppress_tokens=[], guidance_scale=1.0, cache_implementation="dynamic", do_sample=False)
    assert generate(tiny.model(), tiny.tokenizer(), ["ab"], generation_config=harmless, max_new_tokens=3)


# ---- models that are not simply in memory


def test_a_model_spread_over_memory_and_disk_gives_the_same_text(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    """accelerate's device_map: hooks fetch the weights of a layer when it runs."""
    from transformers import AutoModelForCausalLM

    folder, run = checkpoint
    place = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk", "model.layers.3": "cpu",
             "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu"}

    def load(**changes: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=place | changes, offload_folder=str(tmp_path / "off"))

    spread, tokenizer = load(), tiny.tokenizer()
    assert any(p.is_meta for p in spread.parameters())
    plain = generate(tiny.model(), tokenizer, PROMPTS, max_new_tokens=12)
    for draft in ({}, {"draft": "ngram"}, {"draft": run, "tree": "dynamic:depth=2,top_k=2,nodes=4"}, {"draft": tiny.model(seed=1)}):
        assert generate(spread, tokenizer, PROMPTS, max_new_tokens=12, **draft) == plain  # type: ignore[arg-type]
    assert generate(tiny.model(), tokenizer, PROMPTS, max_new_tokens=12, draft=spread) == plain
    assert generate(load(lm_head="disk"), tokenizer, PROMPTS, max_new_tokens=12, draft="suffix") == plain
    with pytest.raises(RecipeError, match="lm_head, which is offloaded"):
        generate(load(lm_head="disk"), tokenizer, PROMPTS, draft=run)
    with pytest.raises(RecipeError, match="embeddings are offloaded"):
        generate(load(**{"model.embed_tokens": "disk"}), tokenizer, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_is_its_own_target(tmp_path: Path, bits: int) -> None:
    """bitsandbytes on a CPU, bfloat16. 8 bits round the activations as well: in float32 the tree's self-check refuses that."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tiny.save(tmp_path / "t", intermediate_size=128)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config, device_map="cpu")
    assert "bitsandbytes" in type(model.model.layers[0].mlp.up_proj).__module__
    tokenizer, new = tiny.tokenizer(), 12
    ids = tokenizer(["Hello there"], return_tensors="pt").input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()
    def after(prefix: list[int]) -> Any:
        return model(torch.tensor([ids[0].tolist() + prefix])).logits[0, -1].tolist()

    for draft in (None, "ngram", tiny.model(seed=1)):
        (found,) = generate(model, tokenizer, ["Hello there"], draft=draft, max_new_tokens=new, return_completions=True)
        # bfloat16 has ties that another width of the forward breaks the other way.
        difference = compare(expected, found.tokens, after, "bfloat16")  # type: ignore[union-attr]
        assert difference.verdict != UNEXPLAINED, difference


def test_the_readmes_examples_run(checkpoint: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = checkpoint
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M)
    code = code.replace("runs/smollm2-135m", str(run)).replace('"smollm2-135m"', repr(str(folder)))
    names = {"model": tiny.model(), "tokenizer": tiny.tokenizer(), "smaller_model": tiny.model(seed=1, num_hidden_layers=1)}
    exec(code, names)
    assert capsys.readouterr().out and len(names["texts"]) == 1  # type: ignore[arg-type]


def test_stop_strings_are_not_part_of_the_text() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    (text,) = generate(model, tokenizer, ["Hello"], max_new_tokens=30)
    stop = str(text)[6:8]
    assert generate(model, tokenizer, ["Hello"], max_new_tokens=30, stop_strings=[stop]) == [str(text)[: str(text).index(stop)]]
    decoder = SpeculativeDecoder(Target.from_model(model, tokenizer), NgramDrafter())
    assert "".join(decoder.stream("Hello", limits=Limits(30, 64, stop_strings=(stop,)))) == str(text)[: str(text).index(stop)]


def test_bad_input_is_one_clear_line(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    swapped = SimpleNamespace(get_vocab=lambda: {**tokenizer.get_vocab(), "a": 69, "b": 68})
    cases = {
        "its prompt has 2 tokens": lambda: generate(model, tokenizer, ["ab"], max_len=2),
        "no tokens": lambda: generate(model, tokenizer, [""]),
        "put a single prompt": lambda: generate(model, tokenizer, "ab"),
        "needs its tokenizer": lambda: generate(model, prompts=["ab"]),
        "no checkpoint folder": lambda: generate(model, tokenizer, ["ab"], draft="nowhere"),
        "did you mean 'suffix'": lambda: generate(model, tokenizer, ["ab"], draft="sufix"),
        "draft is a int": lambda: generate(model, tokenizer, ["ab"], draft=3),
        "draft_tokenizer belongs to": lambda: generate(model, tokenizer, ["ab"], draft="ngram", draft_tokenizer=tokenizer),
        "for copying alone, draft='ngram'": lambda: generate(model, tokenizer, ["ab"], copy_first="ngram"),
        "copy_first is 'head'": lambda: generate(model, tokenizer, ["ab"], draft=checkpoint[1], copy_first="head"),
        "no multi-token-prediction layers": lambda: generate(model, tokenizer, ["ab"], draft="mtp"),
        "their tokenizers differ": lambda: generate(model, tokenizer, ["ab"], draft=tiny.model(), draft_tokenizer=swapped),
        "tree 'bush' is not known": lambda: generate(model, tokenizer, ["ab"], tree="bush"),
        "gamma is 0": lambda: generate(model, tokenizer, ["ab"], gamma=0),
        "top_p=0": lambda: generate(model, tokenizer, ["ab"], top_p=0),
        "lossy='medusa'": lambda: generate(model, tokenizer, ["ab"], lossy="medusa"),
        "unknown argument 'temprature'; did you mean 'temperature'": lambda: generate(model, tokenizer, ["ab"], temprature=1),
        "it is copy_first='ngram' here": lambda: generate(model, tokenizer, ["ab"], ngram_first=True),
        "it is draft here": lambda: generate(model, tokenizer, ["ab"], assistant_model=model),
        "draftheads.json": lambda: generate(model, tokenizer, ["ab"], draft=tmp_path),
        "no chat template": lambda: generate(model, tiny.tokenizer(128, None), [PROMPTS[1]]),
        "max_new_tokens is 0": lambda: generate(model, tokenizer, ["ab"], max_new_tokens=0, max_len=9),
        "a prompt is 3; wanted text": lambda: generate(model, tokenizer, [3]),  # type: ignore[list-item]
        r"a prompt is \[True\]; wanted text": lambda: generate(model, tokenizer, [[True]]),
        r"a prompt is \[1.5\]; wanted text": lambda: generate(model, tokenizer, [[1.5]]),  # type: ignore[list-item]
        "the chat template of .* refuses the prompt": lambda: generate(model, tiny.tokenizer(128, "{{ raise_exception('no') }}"), [PROMPTS[1]]),
    }
    for line, call in cases.items():
        with pytest.raises(RecipeError, match=line) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "said"), [
    ({"stop_strings": ""}, "stop_strings holds an empty text"), ({"stop_strings": ["x", ""]}, "stop_strings holds an empty text"),
    ({"stop_strings": [3]}, "stop_strings is"), ({"stop_strings": 3}, "stop_strings is 3"),
    ({"max_new_tokens": "5"}, "max_new_tokens is '5'"), ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"), ({"max_new_tokens": True}, "is True"),
    ({"max_len": 9.0}, "max_len is 9.0"), ({"max_len": 0}, "max_len is 0"), ({"gamma": 1.5}, "gamma is 1.5"), ({"gamma": 257}, "of 1 … 256"),
    ({"batch_size": 0}, "batch_size is 0"), ({"batch_size": "2"}, "batch_size is '2'"), ({"seed": 0.5}, "seed is 0.5"), ({"tree": 5}, "tree is 5"),
    ({"draft": "ngarm"}, "did you mean 'ngram'"), ({"draft": "suffix", "copy_first": "ngram"}, "copying before a head or a model"),
], ids=str)
def test_values_are_checked_before_anything_runs(options: dict[str, Any], said: str) -> None:
    def never(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("the model ran")

    model = tiny.model()
    model.model.layers[0].forward = never
    with pytest.raises(RecipeError, match=said) as caught:
        generate(model, tiny.tokenizer(), ["ab"], **options)
    assert "\n" not in str(caught.value)


def test_a_decoder_checks_what_it_is_given_later() -> None:
    decoder = SpeculativeDecoder(Target.from_model(tiny.model(), tiny.tokenizer()), "ngram")
    for limits, said in ((Limits(8, 64, stop_strings=("",)), "stop_strings"), (Limits("8", 64), "max_new_tokens"), (Limits(8, 64.5), "max_len")):  # type: ignore[arg-type]
        for call in (decoder.complete, lambda prompts, limits: list(decoder.stream(prompts[0], limits=limits))):
            with pytest.raises(RecipeError, match=said):
                call(["ab"], limits=limits)  # type: ignore[operator]
    with pytest.raises(RecipeError, match="seed is None"):
        list(decoder.stream("ab", seed=None))  # type: ignore[arg-type]


def test_the_package_exports_what_it_promises() -> None:
    assert all(getattr(inference, name) is not None for name in inference.__all__)
    with pytest.raises(AttributeError):
        _ = inference.nothing
