"""Chat templates: the prompt as it is sent, and which tokens of a conversation the target would have produced.

    messages ─► the template's text ─► one tokenization with character offsets ─► ids
    assistant turn k ─► its characters in that text, turn end included ─► flags

Where the template has {% generation %} markers they say which tokens are the answer. Otherwise the characters are found by rendering:
what the generation prompt supplies is a prefix of the text, and the content is what changes when another content is put in its place.
No list of known templates and no regular expressions; what cannot be derived is refused, never guessed (TRL#4201, Megatron-Bridge#3359).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from draftheads.data.conversations import Message
from draftheads.recipes.schema import RecipeError

MARKER = "generation"


class Refused(RecipeError):
    """The template cannot hold this conversation; words: its own, or what is missing in its text."""

    def __init__(self, roles: str, words: str) -> None:
        super().__init__(f"the chat template refuses a conversation of turns {roles}: {words}")
        self.words = words


def render_text(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] | None = None
) -> str:
    """The template's text. RecipeError without a template; Refused where the template refuses the conversation (its own words are kept), or leaves
    out a system turn that is not the first turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise RecipeError("the tokenizer has no chat template: set target.chat_template (in Python: chat_template=PATH) to a jinja file, or use "
                          'prompts of the form {"text": …}, which are continued as they are')
    roles = ", ".join(m["role"] for m in messages)
    options: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options))
    except Exception as error:  # jinja's errors and whatever the template raises
        raise Refused(roles, " ".join(str(error).split())[:200]) from None
    if any(m["role"] == "system" and m["content"].strip() not in text for m in messages[1:]):
        raise Refused(roles, "it leaves a later system turn out")
    return text


def render(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of the conversation as it is sent."""
    return encode(tokenizer, render_text(tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools))


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Ids of a text. special: add the tokenizer's own BOS and the like; a template's text has them already (double BOS is a classic)."""
    return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]


def answer_mask(
    tokenizer: Any, messages: Sequence[Message], *, eos_ids: Collection[int] = (), tools: Sequence[dict[str, Any]] | None = None
) -> tuple[list[int], list[bool]]:
    """ids [L] and flags [L]: True on every assistant turn's tokens and its turn-end token, False on system, user, headers and on all that
    the generation prompt supplies. eos_ids: ids that end an answer beside the tokenizer's own (Target.eos_ids).

    RecipeError where it cannot be derived, and where assistant turns end up with no flag or all tokens with one.
    """
    ends = {int(i) for i in eos_ids} | ({int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set())
    chat = _Chat(tokenizer, tools)
    text = chat.text(messages)
    ids = encode(tokenizer, text)
    if not any(m["role"] == "assistant" for m in messages):
        return ids, [False] * len(ids)
    if _has_markers(tokenizer):
        flags = _flags_from_markers(chat, messages, ids)
    else:
        spans = [_answer_span(chat, messages, k, text) for k, m in enumerate(messages) if m["role"] == "assistant"]
        flags = _flags_from_spans(tokenizer, text, ids, spans)
    flags = _settle_ends(tokenizer, ids, flags, ends)
    check_coverage(sum(flags), len(flags), "this conversation's answer mask")
    return ids, flags


def check_coverage(supervised: int, total: int, what: str) -> None:
    """Refuse a mask that covers nothing or everything: both mean that answers were not told from prompts."""
    if not 0 < supervised < total:
        share = "0 %" if supervised == 0 else "100 %"
        raise RecipeError(f"{what} covers {share} of {total} tokens: look at specdec show-mask; a chat template (target.chat_template) "
                          "with {% generation %} markers around the answers settles it")


@dataclass(frozen=True)
class _Chat:
    tokenizer: Any
    tools: Sequence[dict[str, Any]] | None = None

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """prompt: with what the template adds before an answer."""
        return render_text(self.tokenizer, messages, add_generation_prompt=prompt, tools=self.tools)


# --- by markers ------------------------------------------------------------------------------------------------------------------------


def _has_markers(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    return any(f"{{%{dash} {MARKER}" in t or f"{{%{dash}{MARKER}" in t for t in texts for dash in ("", "-"))


def _flags_from_markers(chat: _Chat, messages: Sequence[Message], ids: list[int]) -> list[bool]:
    options: dict[str, Any] = {} if chat.tools is None else {"tools": list(chat.tools)}
    try:
        marked = chat.tokenizer.apply_chat_template(list(messages), return_assistant_tokens_mask=True, return_dict=True, **options)
    except (ValueError, NotImplementedError) as error:  # slow tokenizers know no offsets
        raise RecipeError(f"the template's generation markers need a fast tokenizer: {' '.join(str(error).split())[:200]}") from None
    found = [int(i) for i in marked["input_ids"]]
    if found != ids:
        raise RecipeError("the chat template renders differently when its generation markers are read: give another target.chat_template")
    return [bool(f) for f in marked["assistant_masks"]]


# --- by rendering ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the text: the answer with its turn end. `loose`: the blanks before start belong to no one, so a token
    that begins with them may still be the answer's."""

    start: int
    end: int
    loose: bool


def _answer_span(chat: _Chat, messages: Sequence[Message], k: int, text: str) -> Span:
    if "tool_calls" in messages[k]:
        return _call_span(chat, messages, k, text)
    content_start, content_end = _content_span(chat, messages, k, text)
    end = content_end + _turn_end_length(chat, messages, k, text[content_end:])
    bare, prompt, alone = chat.text(messages[:k]), chat.text(messages[:k], prompt=True), chat.text(messages[: k + 1])
    # The answer begins where the prompt as sent ends.
    if prompt != bare and text.startswith(prompt) and len(prompt) <= (content_end if content_start is None else content_start):
        return Span(len(prompt), end, False)
    if content_start is None:
        raise _unknown(k)
    # Or as far before the content as it does if the conversation stops here: a system prompt may be written into the last user turn.
    alone_start, _ = _content_span(chat, messages[: k + 1], k, alone)
    lead = alone[len(prompt) : alone_start] if alone_start is not None and alone.startswith(prompt) else None
    if lead is not None and (prompt != bare or not lead.strip()) and text[:content_start].endswith(lead):
        return Span(content_start - len(lead), end, False)
    # Not so where the template knows no generation prompt and writes a header ("ASSISTANT:") only with the answer, nor where it adds to
    # the prompt what it strips from finished turns ("<think>").
    return Span(content_start, end, True)


def _call_span(chat: _Chat, messages: Sequence[Message], k: int, text: str) -> Span:
    """A turn that calls tools is the template's own writing of the call: all from the prompt as sent to where the conversation could stop."""
    prompt, whole = chat.text(messages[:k], prompt=True), chat.text(messages[: k + 1])
    end = len(whole.rstrip())
    if not (len(prompt) < end and text.startswith(prompt) and text.startswith(whole[:end])):
        raise RecipeError(f"cannot tell what the assistant wrote in turn {k + 1}, which calls a tool; give a chat template with {{% generation %}} "
                          "markers as target.chat_template")
    return Span(len(prompt), end, False)


def _content_span(chat: _Chat, messages: Sequence[Message], k: int, text: str) -> tuple[int | None, int]:
    """Where the content of turn k stands: its first and last letters are those that change when others are put in their place. The start is None
    where the template takes the first letters out, or reads them ("<think>")."""
    content = messages[k]["content"].strip()
    if not content:
        at = _changed(text, chat.text(_with_content(messages, k, "Q")), "", "Q")
        if at is None:
            raise _unknown(k)
        return at, at
    first, last = ("Z" if letter == "Q" else "Q" for letter in (content[0], content[-1]))
    start = _changed(text, chat.text(_with_content(messages, k, first + content[1:])), content[0], first)
    before = _changed(text, chat.text(_with_content(messages, k, content[:-1] + last)), content[-1], last)
    if before is None or start is not None and text[start : before + 1].strip() not in content:
        raise _unknown(k)
    return start, before + 1


def _with_content(messages: Sequence[Message], k: int, content: str) -> list[Message]:
    return [*messages[:k], messages[k] | {"content": content}, *messages[k + 1 :]]


def _changed(text: str, other: str, old: str, new: str) -> int | None:
    """Where `old` became `new`, if nothing else changed."""
    at = len(os.path.commonprefix([text, other]))
    same = text[at:].startswith(old) and other[at:].startswith(new) and text[at + len(old) :] == other[at + len(new) :]
    return at if same and text != other else None


def _unknown(k: int) -> RecipeError:
    return RecipeError(f"cannot tell what the assistant wrote in turn {k + 1}: the chat template rewrites its content; give one with "
                       "{% generation %} markers as target.chat_template")


def _turn_end_length(chat: _Chat, messages: Sequence[Message], k: int, after: str) -> int:
    """How much of the text after the content ends the turn: up to the first special token that the template writes even if the
    conversation stops here, or else all of that but trailing blanks."""
    alone = chat.text(messages[: k + 1])
    suffix = alone[_content_span(chat, messages[: k + 1], k, alone)[1] :]
    common = os.path.commonprefix([suffix, after])
    special = [t for t in _special_tokens(chat.tokenizer) if t in common]
    if special:
        return min(common.index(t) + len(t) for t in special)
    return len(common.rstrip())


def _special_tokens(tokenizer: Any) -> set[str]:
    added = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return {t for t in added | set(tokenizer.all_special_tokens) if t.strip()}


def _flags_from_spans(tokenizer: Any, text: str, ids: list[int], spans: Sequence[Span]) -> list[bool]:
    if not getattr(tokenizer, "is_fast", False):
        return _flags_from_prefixes(tokenizer, text, ids, spans)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    flags = [any(_inside(text, start, end, span) for span in spans) for start, end in offsets]
    for i in range(1, len(ids) - 1):  # a token without characters between two of the answer's is the answer's
        start, end = offsets[i]
        flags[i] = flags[i] or start == end and flags[i - 1] and flags[i + 1]
    return flags


def _inside(text: str, start: int, end: int, span: Span) -> bool:
    """A token that also holds characters of the prompt is not what the target produces after the prompt as sent."""
    if start == end or end > span.end:
        return False
    return start >= span.start or (span.loose and end > span.start and not text[start : span.start].strip())


def _flags_from_prefixes(tokenizer: Any, text: str, ids: list[int], spans: Sequence[Span]) -> list[bool]:
    """Without offsets: the ids of the text cut at a boundary must be the first ids of the whole text."""
    flags = [False] * len(ids)
    for span in spans:
        start, end = (encode(tokenizer, text[:cut]) for cut in (span.start, span.end))
        if ids[: len(start)] != start or ids[: len(end)] != end:
            raise RecipeError(f"{type(tokenizer).__name__} gives no character offsets, and an answer's boundary falls inside a token: "
                              "use the fast tokenizer of this model")
        flags[len(start) : len(end)] = [True] * (len(end) - len(start))
    return flags


def _settle_ends(tokenizer: Any, ids: list[int], flags: list[bool], ends: Collection[int]) -> list[bool]:
    """The target stops at its end token: it is the last token of every answer, and nothing after it is.

    Markers often leave it out, or take the newline behind it in; some templates end a turn by the next header (GLM's <|user|>).
    """
    settled, ended = list(flags), False
    for i, token in enumerate(ids):
        ended = ended and flags[i]
        if ended:
            settled[i] = False
        elif flags[i]:
            ended = token in ends
        elif token in ends and i and settled[i - 1] and ids[i - 1] not in ends:
            settled[i] = True
    return settled
