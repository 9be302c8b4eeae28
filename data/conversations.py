"""Prompts from anywhere, as conversations with right roles, or dropped with a reason.

    JSONL / JSON / Parquet file, Hub data set, or 'builtin' ─► records ─► one of five forms ─► roles by name ─► checked ─► deduplicated
      ─► at most `limit`, spread evenly over the categories ─► list of Conversation, counts of dropped by reason

Forms of a record, by the first key found: `messages` (role, content), `conversations` (ShareGPT: from, value), `instruction` (input,
output), `prompt` (a user turn, or messages), `text` (continued as it is, without a chat template). Beside them: id, category, system.
Assistant turns are kept here; distillation replaces every one by the target's own.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftheads.recipes.schema import RecipeError, content_hash

Message = dict[str, str]

# Never by position: ShareGPT conversations often begin in the middle, and a guess would train on user text (axolotl#723).
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant", "bard": "assistant",
}
FILES = (".jsonl", ".ndjson", ".json", ".parquet")


class Dropped(ValueError):
    """This record cannot be used; the message is the reason that is counted."""


@dataclass(frozen=True)
class Conversation:
    """messages: [{"role": system|user|assistant, "content": text}], an optional system turn first, then user and assistant in turn.
    With `text` (and no messages) the prompt is that text itself."""

    id: str
    messages: list[Message]
    category: str
    source: str
    text: str | None = None

    @property
    def hash(self) -> str:
        """Of what the target will be sent: system and user turns. Assistant turns are replaced, so they don't tell conversations apart."""
        return content_hash([self.text, [m for m in self.messages if m["role"] != "assistant"]])

    def row_id(self, turn: int) -> str:
        """Of the row that holds the answer to user turn `turn` (from 1)."""
        return self.id if self.turns == 1 else f"{self.id}@{turn}"

    @property
    def turns(self) -> int:
        """How many answers this conversation asks for."""
        return max(1, sum(m["role"] == "user" for m in self.messages))

    @property
    def user_text(self) -> str:
        return self.text or "\n".join(m["content"] for m in self.messages if m["role"] == "user")


def read_prompts(
    spec: str | list[str], *, limit: int | None = None, seed: int = 0, system: str | None = None, builtin: str = "draftheads.data.prompts"
) -> tuple[list[Conversation], dict[str, int]]:
    """Read, check, deduplicate and select. spec: 'builtin' (the *.jsonl files of package `builtin`), a file, a Hub data set ('id' or
    'id:split'), or a list of those. `system` is given to conversations that have none.

    Returns the conversations, mixed over the categories in an order that depends on their content and the seed only, and how many
    records were dropped, by reason. Raises RecipeError for a missing file, a bad line (named), or where nothing usable is left.
    """
    specs = [spec] if isinstance(spec, str) else spec
    dropped: Counter[str] = Counter()
    kept: dict[str, Conversation] = {}
    keys: set[str] = set()
    for item in specs:
        for source, record in _records(item, builtin):
            keys.update(map(str, record))
            try:
                conversation = parse(record, source=source, system=system)
            except Dropped as reason:
                dropped[str(reason)] += 1
                continue
            if conversation.hash in kept:
                dropped["duplicate"] += 1
            else:
                kept[conversation.hash] = conversation
    if not kept:
        why = ", ".join(f"{n} × {reason}" for reason, n in dropped.most_common()) or "it is empty"
        raise RecipeError(f"no usable prompt in {', '.join(specs)}: {why}. Wanted records with messages, conversations, instruction, "
                          f"prompt or text" + (f"; found the keys {', '.join(sorted(keys)[:12])}" if keys else ""))
    return _select(_unique_ids(kept.values()), limit, seed), dict(dropped)


def parse(record: dict[str, Any], *, source: str, system: str | None = None) -> Conversation:
    """One record of any form → a checked Conversation. Raises Dropped with the reason."""
    category = str(record.get("category") or source)
    text = record.get("text")
    turns, record_system = _turns(record), record.get("system") or record.get("system_prompt")
    if turns is None:
        if not isinstance(text, str) or not text.strip():
            raise Dropped("no known form" if text is None else "empty turn")
        return _named(Conversation("", [], category, source, text), record)
    messages = [{"role": _role(role), "content": _text(content)} for role, content in turns]
    if isinstance(record_system, str) and record_system.strip():
        if messages and messages[0]["role"] == "system":
            if messages[0]["content"].strip() != record_system.strip():
                raise Dropped("two different system prompts")
        else:
            messages.insert(0, {"role": "system", "content": record_system})
    if system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    _check(messages)
    return _named(Conversation("", messages, category, source), record)


def _named(conversation: Conversation, record: dict[str, Any]) -> Conversation:
    given = record.get("id") if record.get("id") not in (None, "") else record.get("conversation_id")
    try:
        "".join([str(given), conversation.category, conversation.text or "", *(m["content"] for m in conversation.messages)]).encode()
    except UnicodeEncodeError:  # JSON may spell half a character: \\ud800
        raise Dropped("half a surrogate pair") from None
    return replace(conversation, id=str(given) if given not in (None, "") else f"{conversation.source}/{conversation.hash[:12]}")


def _turns(record: dict[str, Any]) -> list[tuple[Any, Any]] | None:
    """(role, content) pairs, or None where the record has no conversation."""
    for key in ("messages", "conversations", "conversation", "prompt"):
        turns = record.get(key)
        if isinstance(turns, list):
            if not all(isinstance(t, dict) for t in turns):
                raise Dropped("turns that are no objects")
            return [(t.get("role", t.get("from")), t.get("content", t.get("value"))) for t in turns]
    if isinstance(record.get("instruction"), str):
        extra = record.get("input")
        question = record["instruction"] + (f"\n\n{extra}" if isinstance(extra, str) and extra.strip() else "")
        answer = record.get("output")
        return [("user", question)] + ([("assistant", answer)] if isinstance(answer, str) and answer.strip() else [])
    if isinstance(record.get("prompt"), str):
        return [("user", record["prompt"])]
    return None


def _role(name: Any) -> str:
    role = ROLES.get(str(name).strip().lower())
    if role is None:
        raise Dropped(f"unknown role {str(name)[:40]!r}")
    return role


def _text(content: Any) -> str:
    if isinstance(content, list):  # the parts form: [{"type": "text", "text": …}]
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            raise Dropped("content that is not text")
        content = "".join(p["text"] for p in content)
    if content is None or isinstance(content, str) and not content.strip():
        raise Dropped("empty turn")
    if not isinstance(content, str):
        raise Dropped("content that is not text")
    return content


def _check(messages: list[Message]) -> None:
    roles = [m["role"] for m in messages]
    if "system" in roles[1:]:
        raise Dropped("system turn after the first turn")
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if "user" not in talk:
        raise Dropped("no user turn")
    if talk[0] == "assistant":
        raise Dropped("first turn from the assistant")
    for before, after in zip(talk, talk[1:], strict=False):
        if before == after:
            raise Dropped(f"two {before} turns in a row")


def _records(spec: str, builtin: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(source, record) pairs; the source is the file's or data set's name."""
    if spec == "builtin":
        files = sorted((f for f in importlib.resources.files(builtin).iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
        if not files:
            raise RecipeError(f"the package {builtin} holds no *.jsonl prompts; reinstall draftheads, or set data.prompts to a file")
        for file in files:
            for record in _jsonl(file.read_text(encoding="utf-8-sig"), file.name):
                yield file.name.removesuffix(".jsonl"), record
        return
    path = Path(spec).expanduser()
    if path.suffix in FILES or path.is_file():
        for record in _file(path):
            yield path.stem, record
    elif path.exists() or spec.startswith((".", "/", "~")):
        raise RecipeError(f"{spec}: no such prompts file (wanted {', '.join(FILES)}, a Hub data set id, or 'builtin')")
    else:
        name, _, split = spec.partition(":")
        for record in _load_dataset(spec, name, split=split or "train"):
            yield name, record


def _file(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        raise RecipeError(f"no prompts file {path}; data.prompts takes a JSONL or Parquet file, a Hub data set id, or 'builtin'")
    if path.suffix == ".parquet":
        return _load_dataset(str(path), "parquet", data_files=str(path), split="train", streaming=True)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read {path}: {error}; wanted UTF-8 text") from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{path} is not valid JSON: {error}") from None
        return [_object(r, f"{path}, record {i + 1}") for i, r in enumerate(records)]
    return _jsonl(text, str(path))


def _jsonl(text: str, name: str) -> Iterator[dict[str, Any]]:
    # Not splitlines(): JSON strings may hold U+2028 and its kin, which are no line ends here.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecipeError(f"{name}, line {number}: not valid JSON ({error}); mend or remove the line") from None
            yield _object(record, f"{name}, line {number}")


def _object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise RecipeError(f"{where}: wanted a JSON object like {{\"messages\": […]}}, found {type(record).__name__}")
    return record


def _load_dataset(spec: str, *args: Any, **options: Any) -> Iterable[dict[str, Any]]:
    import datasets

    try:
        yield from datasets.load_dataset(*args, **options)
    except Exception as error:  # the hub client, arrow and the network raise dozens of kinds
        first = str(error).strip().splitlines() or [""]
        raise RecipeError(f"cannot read the data set {spec}: {type(error).__name__}: {first[0][:200]}. Give a JSONL or Parquet file, "
                          f"'builtin', or a Hub id with its split, like org/name:train_sft") from None


def _unique_ids(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Ids key resuming and noise: of two different conversations of one id, or with a row of one id (`a@1`, and the first turn of `a`), both
    get the content's hash appended."""
    conversations = list(conversations)
    ids = [{c.id, *(c.row_id(turn + 1) for turn in range(c.turns))} for c in conversations]
    times = Counter(name for names in ids for name in names)
    return [c if all(times[n] == 1 for n in names) else replace(c, id=f"{c.id}#{c.hash[:8]}") for c, names in zip(conversations, ids, strict=True)]


def _select(conversations: list[Conversation], limit: int | None, seed: int) -> list[Conversation]:
    """Round-robin over the categories, inside a category by hash: neither depends on the order of the file, and a smaller limit is
    a prefix of a larger one."""
    by_category: dict[str, list[Conversation]] = {}
    for c in sorted(conversations, key=lambda c: _rank(c.hash, seed)):
        by_category.setdefault(c.category, []).append(c)
    categories = sorted(by_category, key=lambda name: _rank(name, seed))
    longest = max(map(len, by_category.values()))
    chosen = [by_category[name][i] for i in range(longest) for name in categories if i < len(by_category[name])]
    return chosen[:limit]


def _rank(text: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()
