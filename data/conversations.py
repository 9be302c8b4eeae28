"""A record of any known form as a conversation with right roles, or dropped with a reason.

    record ─► one of five forms ─► roles by name ─► messages ─► checked ─► Conversation

Forms, by the first key found: `messages` (role, content), `conversations` (ShareGPT: from, value), `instruction` (input, output), `prompt`
(a user turn, or messages), `text` (continued as it is, without a chat template). Beside them: id, category, system, tools.

Assistant turns are kept here; distillation replaces them by the target's own, but for those that call a tool: their results are in the
data, and answer no other call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from draftheads.recipes.schema import content_hash

# {"role": system|user|assistant|tool, "content": text}; an assistant's may have tool_calls and reasoning_content, a tool's tool_call_id and name.
Message = dict[str, Any]

# Never by position: ShareGPT conversations often begin in the middle, and a guess would train on user text (axolotl#723).
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool", "ipython": "tool",
    "function_call": "call", "tool_call": "call",  # an assistant's turn whose text is the call
}
REASONING = ("reasoning_content", "reasoning", "thinking")


class Dropped(ValueError):
    """This record cannot be used; the message is the reason that is counted."""


@dataclass(frozen=True)
class Ask:
    """One answer that the target is asked for: what is added to the history before it. called: the data's own turn that calls the tools whose
    results `added` begins with; it takes the place of the target's answer in the history."""

    added: list[Message]
    called: Message | None = None


@dataclass(frozen=True)
class Conversation:
    """messages: user, assistant and tool turns, system turns anywhere. With `text` (and no messages) the prompt is that text itself.
    tools: JSON schemas of functions, as chat templates take them."""

    id: str
    messages: list[Message]
    category: str
    source: str
    text: str | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def hash(self) -> str:
        """Of what the target will be sent. Assistant turns are replaced, so they don't tell conversations apart."""
        sent = [m for m in self.messages if m["role"] != "assistant" or "tool_calls" in m]
        return content_hash([self.text, sent] + ([self.tools] if self.tools else []))

    def row_id(self, turn: int) -> str:
        """Of the row that holds answer `turn` (from 1)."""
        return self.id if self.turns == 1 else f"{self.id}@{turn}"

    @property
    def turns(self) -> int:
        """How many answers this conversation asks for."""
        return max(1, len(self.asks()))

    @property
    def user_text(self) -> str:
        return self.text or "\n".join(m["content"] for m in self.messages if m["role"] == "user")

    def asks(self) -> list[Ask]:
        """One for each answer; none for a `text`. Of the data's answers only those that call a tool whose result follows are in them."""
        found: list[Ask] = []
        called: Message | None = None
        added: list[Message] = []
        for m in self.messages:
            if m["role"] != "assistant":
                added.append(m)
            elif added:
                found.append(Ask(added, called))
                called, added = (m if "tool_calls" in m else None), []
        return [*found, Ask(added, called)] if any(m["role"] != "system" for m in added) else found


def parse(record: dict[str, Any], *, source: str, system: str | None = None) -> Conversation:
    """One record of any form → a checked Conversation. Raises Dropped with the reason."""
    category = str(record.get("category") or source)
    text = record.get("text")
    turns, record_system = _turns(record), record.get("system") or record.get("system_prompt")
    if turns is None:
        if not isinstance(text, str) or not text.strip():
            raise Dropped("no known form" if text is None else "empty turn")
        return _named(Conversation("", [], category, source, text), record)
    messages = [_message(turn) for turn in turns]
    if isinstance(record_system, str) and record_system.strip():
        if messages and messages[0]["role"] == "system":
            if messages[0]["content"].strip() != record_system.strip():
                raise Dropped("two different system prompts")
        else:
            messages.insert(0, {"role": "system", "content": record_system})
    if system and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": system})
    _check(messages)
    return _named(Conversation("", messages, category, source, tools=_tools(record.get("tools"))), record)


def _named(conversation: Conversation, record: dict[str, Any]) -> Conversation:
    given = record.get("id") if record.get("id") not in (None, "") else record.get("conversation_id")
    try:
        "".join([str(given), conversation.category, conversation.text or "", json.dumps([conversation.messages, conversation.tools],
                                                                                       ensure_ascii=False)]).encode()
    except UnicodeEncodeError:  # JSON may spell half a character: \\ud800
        raise Dropped("half a surrogate pair") from None
    except TypeError:  # a data set's column of another kind
        raise Dropped("a tool call that is not JSON") from None
    return replace(conversation, id=str(given) if given not in (None, "") else f"{conversation.source}/{conversation.hash[:12]}")


def _turns(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Turns as they are given, or None where the record has no conversation."""
    for key in ("messages", "conversations", "conversation", "prompt"):
        turns = record.get(key)
        if isinstance(turns, list):
            if not all(isinstance(t, dict) for t in turns):
                raise Dropped("turns that are no objects")
            return turns
    if isinstance(record.get("instruction"), str):
        extra = record.get("input")
        question = record["instruction"] + (f"\n\n{extra}" if isinstance(extra, str) and extra.strip() else "")
        answer = record.get("output")
        return [{"role": "user", "content": question}] + (
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) and answer.strip() else [])
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    return None


def _message(turn: dict[str, Any]) -> Message:
    role, content = _role(turn.get("role", turn.get("from"))), turn.get("content", turn.get("value"))
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(content)}
    calls = _calls(turn["tool_calls"]) if role == "assistant" and turn.get("tool_calls") else None
    message: Message = {"role": role, "content": _text(content, may_be_empty=calls is not None or role == "tool")}
    if calls is not None:
        message["tool_calls"] = calls
    for key in REASONING:
        if role == "assistant" and isinstance(turn.get(key), str) and turn[key].strip():
            message.setdefault("reasoning_content", turn[key])
    if role == "tool":
        message |= {key: turn[key] for key in ("tool_call_id", "name") if isinstance(turn.get(key), str)}
    return message


def _role(name: Any) -> str:
    role = ROLES.get(str(name).strip().lower())
    if role is None:
        raise Dropped(f"unknown role {str(name)[:40]!r}")
    return role


def _text(content: Any, *, may_be_empty: bool = False) -> str:
    if isinstance(content, list):  # the parts form: [{"type": "text", "text": …}]
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            raise Dropped("content that is not text")
        content = "".join(p["text"] for p in content)
    if content is None or isinstance(content, str) and not content.strip():
        if may_be_empty:
            return ""
        raise Dropped("empty turn")
    if not isinstance(content, str):
        raise Dropped("content that is not text")
    return content


def _calls(given: Any) -> list[dict[str, Any]]:
    """In the form that templates read: {"type": "function", "function": {"name", "arguments": object}}, with the id where there is one.
    OpenAI's own arguments are a string of JSON, which a template would quote once more."""
    given = _json(given)
    calls = []
    for call in given if isinstance(given, list) else [given]:
        call = _json(call)
        function = _json(call.get("function", call)) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Dropped("a tool call without a name")
        arguments = _json(function.get("arguments", function.get("parameters"))) or {}
        calls.append(({"id": call["id"]} if isinstance(call.get("id"), str) else {})
                     | {"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _tools(given: Any) -> list[dict[str, Any]] | None:
    given = _json(given)
    if given is None or given == [] or given == "":
        return None
    tools = [_json(tool) for tool in given] if isinstance(given, list) else [given]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Dropped("tools that are no objects")
    return tools


def _json(given: Any) -> Any:
    """What a string of JSON says: data sets of one schema per column keep calls and tools as text."""
    if not isinstance(given, str) or not given.strip():
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise Dropped("a tool call that is not JSON") from None


def _check(messages: list[Message]) -> None:
    talk = [m for m in messages if m["role"] != "system"]
    roles = [m["role"] for m in talk]
    if "user" not in roles:
        raise Dropped("no user turn")
    if roles[0] == "assistant":
        raise Dropped("first turn from the assistant")
    for m, next_ in zip(talk, [*talk[1:], None], strict=True):
        role, after = m["role"], next_["role"] if next_ else None
        if role == after != "tool":
            raise Dropped(f"two {role} turns in a row")
        if role == "assistant" and "tool_calls" in m and after == "user":
            raise Dropped("a tool call without its result")
        if after == "tool" and role != "tool" and "tool_calls" not in m:
            raise Dropped("a tool result without its call")
        if role == "tool" and after == "user":
            raise Dropped("a tool result without an answer")
    if roles[0] == "tool":
        raise Dropped("a tool result without its call")
