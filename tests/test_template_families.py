"""Answer masks on the shapes of published chat templates, written here after them: what ends a turn, where system prompts go, thinking, tools."""

from __future__ import annotations

import json

import pytest

import tiny
from draftheads.data.template import Refused, answer_mask, render_text
from draftheads.recipes.schema import RecipeError

TALK = [
    {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hello again"}, {"role": "assistant", "content": "bye now"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}
TOOLS = [{"role": "user", "content": "one and?"}, CALL, {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "add"},
         {"role": "assistant", "content": "it is 12"}]

QWEN25 = """
{%- if tools %}{{- '<|im_start|>system\\n' + (messages[0]['content'] if messages[0]['role'] == 'system' else 'You are helpful.') + '\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'system' and not loop.first or m.role == 'assistant' and not m.tool_calls %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for c in m.tool_calls %}{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Thinking is shown after the last user turn only; enable_thinking false puts an empty one in the prompt.
QWEN3 = """
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}
{%- set content, thought = m.content, m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
LLAMA3 = """
{%- for m in messages %}
{%- if loop.first %}{{- '<|begin_of_text|>' }}{%- endif %}
{%- if m.tool_calls %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
# The system prompt goes into the last user turn: what was sent in an earlier turn is no prefix of the whole.
MISTRAL = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set talk = messages[1:] if system else messages %}
{%- set ns = namespace(last=-1) %}{%- for m in talk %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- '<s>' }}
{%- for m in talk %}
{%- if m.role == 'user' %}{{- '[INST] ' + (system + '\\n\\n' if system and loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [{"name": "' + m.tool_calls[0].function.name + '"}]</s>' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + '</s>' }}
{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported') }}{%- endif %}
{%- endfor %}"""
GEMMA = """
{{- '<bos>' }}{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if first else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Conversation roles must alternate user/assistant') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') + m.content | trim }}
{{- '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
PHI = """
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- '<|endoftext|>' }}{%- endif %}"""
GPT_OSS = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if m.reasoning_content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- else %}{{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# template, its special tokens, what ends an answer; the answers' spans in TALK
FAMILIES = {
    "qwen2.5": (QWEN25, [], "<|im_end|>", ["hello<|im_end|>", "bye now<|im_end|>"]),
    "qwen3": (QWEN3, [], "<|im_end|>", ["hello<|im_end|>", "<think>\n\n</think>\n\nbye now<|im_end|>"]),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], "<|eot_id|>", ["hello<|eot_id|>", "bye now<|eot_id|>"]),
    "mistral": (MISTRAL, ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], "</s>", [" hello</s>", " bye now</s>"]),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>"], "<end_of_turn>", ["hello<end_of_turn>", "bye now<end_of_turn>"]),
    "phi": (PHI, ["<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"], "<|end|>", ["hello<|end|>", "bye now<|end|>"]),
    # An earlier answer is shown with another end token than the target wrote: not supervised.
    "gpt-oss": (GPT_OSS, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"], "<|return|>",
                ["<|channel|>final<|message|>hello", "<|channel|>final<|message|>bye now<|return|>"]),
}


def family(name):
    template, special, end, _ = FAMILIES[name]
    tokenizer = tiny.tokenizer.__wrapped__(128, template.strip("\n"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special, end], "eos_token": end})
    return tokenizer


def spans(tokenizer, messages, **options):
    ids, flags = answer_mask(tokenizer, messages, **options)
    runs, before = [], False
    for token, flag in zip(ids, flags, strict=True):
        if flag:
            runs = runs if before else [*runs, ""]
            runs[-1] += tokenizer.convert_ids_to_tokens(token)
        before = flag
    return runs


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_with_their_turn_ends_and_nothing_of_the_prompt(name, system):
    assert spans(family(name), TALK if system else TALK[1:]) == FAMILIES[name][3]


@pytest.mark.parametrize(("name", "wanted"), [
    ("qwen2.5", ['<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>', "it is 12<|im_end|>"]),
    ("llama3", ['{"name": "add", "parameters": {"x": 1}}<|eot_id|>', "it is 12<|eot_id|>"]),
    ("mistral", ['[TOOL_CALLS] [{"name": "add"}]</s>', " it is 12</s>"]),
])
def test_tool_calls_are_answers_and_results_are_not(name, wanted):
    assert spans(family(name), TOOLS, tools=[TOOL]) == wanted


def test_tools_reach_the_template():
    assert json.dumps(TOOL["function"]["name"]) in render_text(family("qwen2.5"), TOOLS[:1], add_generation_prompt=True, tools=[TOOL])
    assert "# Tools" not in render_text(family("qwen2.5"), TOOLS[:1], add_generation_prompt=True)


@pytest.mark.parametrize("written", ["content", "reasoning_content"])
def test_thinking_of_the_last_answer_is_the_targets_and_that_of_earlier_ones_is_gone(written):
    def answer(text):
        return {"role": "assistant", **({"content": f"<think>\nhm\n</think>\n\n{text}"} if written == "content" else
                                        {"content": text, "reasoning_content": "hm"})}

    talk = [TALK[1], answer("hello"), TALK[3], answer("bye now")]
    assert spans(family("qwen3"), talk) == ["hello<|im_end|>", "<think>\nhm\n</think>\n\nbye now<|im_end|>"]


def test_reasoning_in_a_channel_of_its_own():
    talk = [TALK[1], {"role": "assistant", "content": "hello", "reasoning_content": "hm"}]
    assert spans(family("gpt-oss"), talk) == [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>"]


@pytest.mark.parametrize(("name", "words"), [
    ("gemma", "Conversation roles must alternate user/assistant"),
    ("mistral", "Only user, assistant and tool roles are supported"),
    ("silent", "it leaves a later system turn out"),
])
def test_a_later_system_turn_that_the_template_cannot_hold_is_refused(name, words):
    talk = [TALK[1], TALK[2], {"role": "system", "content": "now be brief"}, TALK[3]]
    tokenizer = family("qwen2.5")
    assert "now be brief" in render_text(tokenizer, talk, add_generation_prompt=True)
    if name == "silent":
        tokenizer.chat_template = tokenizer.chat_template.replace("or m.role == 'system' and not loop.first", "")
    else:
        tokenizer = family(name)
    with pytest.raises(Refused) as refusal:
        render_text(tokenizer, talk, add_generation_prompt=True)
    assert refusal.value.words == words


def test_a_call_that_cannot_be_found_is_refused():
    """A template that says something else of a conversation's last call."""
    tokenizer = family("qwen2.5")
    old, new = "'<|im_start|>assistant' }}", "'<|im_start|>assistant' + ('!' if loop.last else '?') }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    with pytest.raises(RecipeError, match="calls a tool.*generation"):
        answer_mask(tokenizer, TOOLS, tools=[TOOL])
