"""One shard: the target answers every turn of some conversations, on its own earlier replies. In: Conversations. Out: Rows, token-exact.

    first turns ─► queue ─► decode ─► reply ─► the conversation's next turn ─► queue …

Each answered turn is a row of its own: the prompt's ids as they were sent, then the ids as they were produced. Nothing is re-tokenised on
the way to training. Existing assistant turns are replaced. A row's temperature and seed depend on its id only, so neither does its
answer depend on what else is in the shard.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftheads.data import template
from draftheads.data.conversations import Ask, Conversation, Message
from draftheads.data.features import Row, row_seed
from draftheads.inference.decode import decode
from draftheads.inference.described import Described
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.metrics import loop_start
from draftheads.inference.requests import Completion, Limits, Request, Round, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import DataSection, RecipeError

Taps = tuple[int | str, ...]


@dataclass
class Regenerated:
    """rows for training; failed: {"id", "reason", …} of turns without an answer; dropped: conversations left out, by reason."""

    rows: list[Row] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class _Talk:
    """A conversation under way. history: what the target is sent next; waiting: what is asked after that."""

    conversation: Conversation
    history: list[Message]
    waiting: list[Ask]
    turn: int = 1


def regenerate(
    target: Target, conversations: Sequence[Conversation], data: DataSection, taps: Taps | None, on_round: Callable[[Round], None] = lambda _: None,
    drafter: Drafter | None = None,
) -> Regenerated:
    """Answer every turn. taps: capture these states (None: no states). drafter: drafts data.draft_gamma tokens a round; the answers are the same."""
    work = Work(target, data)
    # Longest prompts first: prompts of like lengths are prefilled together, and the last to finish are short ones.
    requests = sorted((r for c in conversations if (r := work.request(begin(c))) is not None), key=lambda r: (-len(r.prompt_ids), r.id))
    work.queue.extend(requests)
    longest = max((len(r.prompt_ids) for r in requests), default=0)
    if any(talk.waiting for talk in work.talks.values()):
        longest = prompt_room(target, data)  # later prompts hold replies of unknown length
    limits = Limits(max_new_tokens=data.max_new_tokens, max_len=longest + data.max_new_tokens)
    batch_size = max(1, min(data.batch_size, len(requests)))
    options: dict[str, Any] = {"batch_size": batch_size, "capture_taps": taps, "plan": Plan(data.draft_gamma)}
    try:
        while work.queue:  # once, if decode reads its requests as late as it says
            for event in decode(target, drafter or NoDrafter(), _Lazy(work.queue), Sampling(top_k=data.top_k, top_p=data.top_p), limits, **options):
                on_round(event)
                for completion in event.finished:
                    # The next turn goes to the head of the queue, so that long conversations don't end alone.
                    if (following := work.finish(completion)) is not None:
                        work.queue.appendleft(following)
    except torch.OutOfMemoryError:
        raise RecipeError(f"out of memory on {target.device} while answering {batch_size} prompts at once; lower data.batch_size") from None
    return work.done(conversations)


def prompt_ids(tokenizer: Any, conversation: Conversation, history: Sequence[Message]) -> list[int]:
    """What the target is sent: the rendered history, or a plain text as it is (with the tokenizer's own BOS)."""
    if conversation.text is not None:
        return template.encode(tokenizer, conversation.text, special=True)
    return template.render(tokenizer, history, add_generation_prompt=True, tools=conversation.tools)


def first_prompt_ids(tokenizer: Any, conversation: Conversation) -> list[int]:
    return prompt_ids(tokenizer, conversation, begin(conversation).history)


def prompt_room(target: Target | Described, data: DataSection) -> int:
    """The longest prompt that still leaves room for a whole answer. RecipeError where there is none."""
    room = min(data.max_prompt_tokens, target.geometry.max_positions - data.max_new_tokens)
    if room < 1:
        raise RecipeError(f"data.max_new_tokens {data.max_new_tokens} leaves no room for a prompt in the {target.geometry.max_positions} "
                          f"positions of {target.name}; lower it")
    return room


def pick_temperature(temperature: float | list[float], seed: int, row_id: str) -> float:
    """The row's own of a mix, by hash: one temperature for a whole run would be no mix."""
    if not isinstance(temperature, list):
        return temperature
    digest = hashlib.sha256(f"temperature:{seed}:{row_id}".encode()).digest()
    return temperature[int.from_bytes(digest[:8], "big") % len(temperature)]


def begin(conversation: Conversation) -> _Talk:
    first, *later = conversation.asks() or [Ask([])]
    return _Talk(conversation, first.added, later)


class _Lazy:
    """Requests as they come up: a queue that is empty now may hold a conversation's next turn after the next round."""

    def __init__(self, queue: deque[Request]) -> None:
        self.queue = queue

    def __iter__(self) -> _Lazy:
        return self

    def __next__(self) -> Request:
        if not self.queue:
            raise StopIteration
        return self.queue.popleft()


class Work:
    """The state of one shard, whoever answers: talks by row id, rows by conversation."""

    def __init__(self, target: Target | Described, data: DataSection) -> None:
        self.target, self.data, self.room = target, data, prompt_room(target, data)
        self.result = Regenerated()
        self.queue: deque[Request] = deque()
        self.talks: dict[str, _Talk] = {}
        self.rows: dict[str, list[Row]] = {}

    def request(self, talk: _Talk) -> Request | None:
        """The next turn's request; None, and counted, where its prompt is too long or too short, or the template refuses it."""
        later = "" if talk.turn == 1 else "later turn's "
        try:
            ids = prompt_ids(self.target.tokenizer, talk.conversation, talk.history)
        except template.Refused as refusal:
            self.result.dropped[f"{later}prompt refused by the chat template: {refusal.words}"] += 1
            return None
        if len(ids) > self.room:
            self.result.dropped[f"{later}prompt longer than {self.room} tokens"] += 1
            return None
        if len(ids) < self.data.min_prompt_tokens:
            self.result.dropped[f"{later}prompt shorter than {self.data.min_prompt_tokens} tokens"] += 1
            return None
        row_id, seed = talk.conversation.row_id(talk.turn), self.data.seed
        self.talks[row_id] = talk
        return Request(row_id, tuple(ids), seed=row_seed(seed, row_id), temperature=pick_temperature(self.data.temperature, seed, row_id))

    def finish(self, completion: Completion, **extra: Any) -> Request | None:
        """Keep the row, with `extra` beside it. -> the conversation's next turn."""
        talk = self.talks.pop(completion.request.id)
        row = _row(self.target, completion, talk, self.data, self.result)
        if row is None:
            return None
        row.extra |= extra
        self.rows.setdefault(talk.conversation.id, []).append(row)
        return self.request(_next(talk, row.extra["answer"])) if talk.waiting else None

    def done(self, conversations: Sequence[Conversation]) -> Regenerated:
        """The rows in the order of the conversations, whatever order they came in."""
        self.result.rows = [row for c in conversations for row in self.rows.get(c.id, [])]
        return self.result


def _row(target: Target | Described, completion: Completion, talk: _Talk, data: DataSection, result: Regenerated) -> Row | None:
    """The training row of a finished answer, cut where a loop begins; None (and a line in `failed`) where there is no answer."""
    request, tokens, reason = completion.request, completion.tokens, completion.finish_reason
    cut = loop_start(tokens) if data.drop_loops and reason != "error" else None
    if cut is not None:
        tokens, reason = tokens[:cut], "loop"
    answer = _answer_text(target, tokens)
    if reason == "error" or not answer.strip():
        why = "error" if reason == "error" else "empty answer"
        result.failed.append({"id": request.id, "reason": why, "finish_reason": completion.finish_reason, "error": completion.error,
                              "tokens": completion.tokens, "seed": request.seed, "temperature": request.temperature,
                              "messages": talk.history, "text": talk.conversation.text})
        return None
    P, L = len(request.prompt_ids), len(request.prompt_ids) + len(tokens)
    states = completion.captured
    conversation = talk.conversation
    extra = {"conversation": conversation.id, "turn": talk.turn, "source": conversation.source, "answer": answer}
    extra |= {"text": conversation.text} if conversation.text is not None else {"messages": talk.history}
    return Row(
        request.id, conversation.category, torch.tensor([*request.prompt_ids, *tokens]), torch.arange(L) >= P, reason,
        float(request.temperature or 0), request.seed,
        None if states is None else states.features_TF[: L - 1], None if states is None else states.final_TD[: L - 1],
        None if states is None else states.lse_T[: L - 1], extra,
    )


def _answer_text(target: Target | Described, tokens: Sequence[int]) -> str:
    kept = list(tokens[:-1] if tokens and tokens[-1] in target.eos_ids else tokens)
    return str(target.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _next(talk: _Talk, answer: str) -> _Talk:
    ask = talk.waiting[0]
    said = ask.called or {"role": "assistant", "content": answer}
    return _Talk(talk.conversation, [*talk.history, said, *ask.added], talk.waiting[1:], talk.turn + 1)
