"""The front door: generate, SpeculativeDecoder, streaming text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draftheads.inference as inference
import tiny
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, save_head
from draftheads.inference import Limits, Sampling, SpeculativeDecoder, Target, generate
from draftheads.inference.drafters.ngram import NgramDrafter
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
    for options in ({}, {"ngram_first": True}, {"batch_size": 3}):
        assert generate(str(folder), prompts=PROMPTS, draft=run, max_new_tokens=20, **options) == plain  # type: ignore[arg-type]
    full = generate(str(folder), prompts=PROMPTS, draft=str(run / "ckpt" / "final"), max_new_tokens=20, return_completions=True)
    assert [c.text for c in full] == plain and any(r.source == "head" for r in full[0].rounds)  # type: ignore[union-attr]


def test_a_checkpoint_is_enough_to_stream(checkpoint: tuple[Path, Path]) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(checkpoint[1])
    for sampling in (Sampling(), Sampling(0.9, top_k=20)):
        (whole,) = decoder.complete([PROMPTS[1]], sampling, Limits(30, 128), seed=1)
        assert "".join(decoder.stream(PROMPTS[1], sampling, Limits(30, 128), seed=1)) == whole.text == decoder.last.text  # type: ignore[union-attr]
        assert decoder.last is not None and decoder.last.tokens == whole.tokens and decoder.last.rounds


def test_stop_strings_are_not_part_of_the_text() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    (text,) = generate(model, tokenizer, ["Hello"], max_new_tokens=30)
    stop = str(text)[6:8]
    assert generate(model, tokenizer, ["Hello"], max_new_tokens=30, stop_strings=[stop]) == [str(text)[: str(text).index(stop)]]
    decoder = SpeculativeDecoder(Target.from_model(model, tokenizer), NgramDrafter())
    assert "".join(decoder.stream("Hello", limits=Limits(30, 64, stop_strings=(stop,)))) == str(text)[: str(text).index(stop)]


def test_bad_input_is_one_clear_line(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    cases = {
        "its prompt has 2 tokens": lambda: generate(model, tokenizer, ["ab"], max_len=2),
        "no tokens": lambda: generate(model, tokenizer, [""]),
        "put a single prompt": lambda: generate(model, tokenizer, "ab"),
        "needs its tokenizer": lambda: generate(model, prompts=["ab"]),
        "checkpoint folder": lambda: generate(model, tokenizer, ["ab"], draft="nowhere"),
        "draftheads.json": lambda: generate(model, tokenizer, ["ab"], draft=tmp_path),
        "no chat template": lambda: generate(model, tiny.tokenizer(128, None), [PROMPTS[1]]),
        "max_new_tokens is 0": lambda: generate(model, tokenizer, ["ab"], max_new_tokens=0, max_len=9),
    }
    for line, call in cases.items():
        with pytest.raises(RecipeError, match=line) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_the_package_exports_what_it_promises() -> None:
    assert all(getattr(inference, name) is not None for name in inference.__all__)
    with pytest.raises(AttributeError):
        _ = inference.nothing
