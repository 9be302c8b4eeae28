"""Answer masks: by rendering and by markers they agree; what cannot be derived is refused."""

from __future__ import annotations

import pytest

import tiny
from draftheads.data.template import answer_mask, check_coverage, render, render_text
from draftheads.recipes.schema import RecipeError

TALK = [
    {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hello again"}, {"role": "assistant", "content": "bye now"},
]

# The same ChatML with markers: around content and turn end; around the content only; around content, turn end and the newline behind.
MARKED = {
    "full": "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    "content": "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
    "newline": "{%- generation -%}{{ m['content'] + '<|im_end|>\\n' }}{%- endgeneration -%}",
}


def marked(answer):
    return (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}" + answer
        + "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def with_template(template):
    tokenizer = tiny.tokenizer.__wrapped__(128, template)
    return tokenizer


def spans(tokenizer, messages, **options):
    """The flagged runs as text."""
    ids, flags = answer_mask(tokenizer, messages, **options)
    assert ids == render(tokenizer, messages, add_generation_prompt=False)
    runs, before = [], False
    for token, flag in zip(ids, flags, strict=True):
        if flag:
            runs = runs if before else [*runs, ""]
            runs[-1] += tokenizer.convert_ids_to_tokens(token)
        before = flag
    return runs


def test_two_assistant_turns_without_markers():
    assert spans(tiny.tokenizer(), TALK) == ["hello<|im_end|>", "bye now<|im_end|>"]


@pytest.mark.parametrize("kind", MARKED)
def test_marked_up_copy_gives_the_same_mask(kind):
    assert answer_mask(with_template(marked(MARKED[kind])), TALK) == answer_mask(tiny.tokenizer(), TALK)


def test_trailing_user_turn_and_prompts_alone_are_unsupervised():
    tokenizer = tiny.tokenizer()
    assert spans(tokenizer, TALK[:4]) == ["hello<|im_end|>"]
    ids, flags = answer_mask(tokenizer, TALK[:2])
    assert not any(flags)
    assert len(flags) == len(ids)


def test_repeated_and_look_alike_contents():
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "assistant\nhello"}, {"role": "assistant", "content": "Question of the answerQ"}]
    assert spans(tiny.tokenizer(), talk) == ["hello<|im_end|>", "Question of the answerQ<|im_end|>"]


# Llama-2's shape: no generation prompt, blanks around the answer, an end token that the next turn does not need.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
# Vicuna's: a header that comes only with the answer where the template ignores add_generation_prompt.
HEADER = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] }}"
    "{{ '<|im_end|>' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
)
# Qwen3's: finished turns lose their thinking, the last answer gets an empty one.
THINK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m['content'].split('</think>')[-1] | trim }}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# DeepSeek-R1's: the generation prompt supplies a <think> that finished turns don't show.
SUPPLIED = tiny.CHATML.replace("'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}")
# No end of turn at all.
ENDLESS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# A final end-of-text after the last turn, which the target never gets to.
CLOSED = tiny.CHATML + "{% if not add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
CHAT = TALK[1:]


@pytest.mark.parametrize(("template", "wanted"), [
    (LLAMA2, [" hello <|im_end|>", " bye now <|im_end|>"]),
    (HEADER, ["hello<|im_end|>", "bye now<|im_end|>"]),
    (THINK, ["hello<|im_end|>", "<think>\n\n</think>\n\nbye now<|im_end|>"]),
    (SUPPLIED, ["hello<|im_end|>", "bye now<|im_end|>"]),
    (ENDLESS, ["hello", "bye now"]),
    (CLOSED, ["hello<|im_end|>", "bye now<|im_end|>"]),
], ids=["llama2", "header", "think", "supplied", "endless", "closed"])
def test_shapes_of_templates(template, wanted):
    assert spans(with_template(template), CHAT) == wanted


def test_next_header_as_end_of_turn_is_supervised_when_it_is_an_end_id():
    glm = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% endfor %}" \
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    tokenizer = with_template(glm)
    assert spans(tokenizer, CHAT) == ["hello", "bye now"]
    assert spans(tokenizer, CHAT, eos_ids={1}) == ["hello<|im_start|>", "bye now"]


def test_turn_end_that_the_tokenizer_does_not_call_eos():
    """Base tokenizers name another end; only the template shows what ends a turn, and the newline behind it is not the target's."""
    tokenizer = with_template(tiny.CHATML)
    tokenizer.eos_token = "<pad>"
    assert spans(tokenizer, CHAT) == ["hello<|im_end|>", "bye now<|im_end|>"]


def test_a_template_that_rewrites_the_answer_is_refused():
    with pytest.raises(RecipeError, match="rewrites its content.*generation"):
        answer_mask(with_template("{% for m in messages %}{{ m['role'] + m['content'] | upper }}{% endfor %}"), CHAT)
    with pytest.raises(RecipeError, match="rewrites its content"):
        answer_mask(with_template("{% for m in messages %}{{ m['role'] }}{% endfor %}"), CHAT)


def test_masks_of_nothing_and_of_everything_are_refused():
    with pytest.raises(RecipeError, match="100 %"):
        answer_mask(with_template("{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"), CHAT)
    nothing = with_template("{% for m in messages %}{{ m['content'] }}{% endfor %}{% generation %}{% endgeneration %}")
    with pytest.raises(RecipeError, match="covers 0 %"):
        answer_mask(nothing, CHAT)
    check_coverage(1, 2, "x")


def test_no_template_names_the_option():
    with pytest.raises(RecipeError, match="target.chat_template") as error:
        render(tiny.tokenizer(128, None), CHAT, add_generation_prompt=True)
    assert "\n" not in str(error.value)


def test_a_template_that_refuses_says_so_in_one_line():
    tokenizer = with_template("{{ raise_exception('System role\\nnot supported') }}")
    with pytest.raises(RecipeError, match="system, user.*System role not supported") as error:
        render_text(tokenizer, TALK[:2], add_generation_prompt=True)
    assert "\n" not in str(error.value)


class Slow:
    """A tokenizer without offsets."""

    is_fast = False

    def __init__(self, inner, merge=""):
        self.inner, self.merge = inner, merge

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, text, **options):
        ids = self.inner(text, **options)["input_ids"]
        if self.merge and self.merge in text:  # a token that straddles the boundary
            at = text.index(self.merge)
            cut = len(self.inner(text[:at], **options)["input_ids"])
            ids = [*ids[:cut], 127, *ids[cut + len(self.merge) :]]
        return {"input_ids": ids}


def test_tokenizers_without_offsets():
    assert answer_mask(Slow(tiny.tokenizer()), TALK) == answer_mask(tiny.tokenizer(), TALK)
    with pytest.raises(RecipeError, match="fast tokenizer"):
        answer_mask(Slow(tiny.tokenizer(), merge="\nhello<"), TALK)


def bpe(template, merges):
    """Whole words as tokens, with the blank before them, like sentencepiece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chars = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {t: i for i, t in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", *chars, *("".join(m) for m in merges)])}
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("zzz", "isolated")
    inner.decoder = decoders.Fuse()
    tok = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<|im_end|>",
                                  additional_special_tokens=["<|im_start|>"])
    tok.chat_template = template
    return tok


def test_a_token_of_prompt_and_answer_is_not_the_answers_but_a_blank_may_lead():
    # "\n" + "h" in one token: after the prompt as sent the target cannot produce it.
    merged = bpe(tiny.CHATML, [("\n", "h")])
    assert spans(merged, TALK[1:3]) == ["ello<|im_end|>"]
    # The answer's last letter and the newline behind it in one token.
    assert spans(bpe(ENDLESS, [("o", "\n")]), TALK[1:3]) == ["hell"]
    # " h" where the template has no generation prompt, so the blank is no one's.
    loose = bpe(HEADER, [(" ", "h")])
    assert spans(loose, TALK[1:3]) == [" hello<|im_end|>"]
