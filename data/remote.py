"""Distillation by servers: all missing shards at once, so that no server waits for a shard's last answer.

    conversations, shard by shard ─► as many under way as the servers take ─► each answer to answers.jsonl ─► a shard whose conversations are
    all done is written

answers.jsonl grows by a line per answer, keyed by what was asked (prompt ids, sampling, model): after a kill, and after a source has changed its
order or grown, what was answered is not asked again. It lies in the run folder and may be deleted when the rows are finished.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftheads.data.conversations import Conversation
from draftheads.data.progress import Progress
from draftheads.data.regenerate import Regenerated, Work, begin, prompt_room
from draftheads.data.servers import Reply, Servers
from draftheads.inference.described import Described
from draftheads.inference.requests import Completion, Request
from draftheads.recipes.schema import DataSection, RecipeError, content_hash

FIRST = 32  # answers: if nearly all of them failed, all will
OnShard = Callable[[int, Regenerated, float], None]


def regenerate_served(
    target: Described, shards: Mapping[int, Sequence[Conversation]], data: DataSection, journal: Path, bar: Progress, on_shard: OnShard
) -> None:
    """Answer the conversations of these shards; on_shard(number, rows, seconds) for each when it is whole, in whatever order.

    RecipeError before long work where a server is not as it should be, during it where none answers any more, or where all they say is failures.
    """
    assert data.servers is not None
    try:
        asyncio.run(_Run(target, data, journal, bar, on_shard).all(shards))
    except BaseExceptionGroup as group:  # of the tasks: one line of one of them says it
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


class _Run:
    def __init__(self, target: Described, data: DataSection, journal: Path, bar: Progress, on_shard: OnShard) -> None:
        assert data.servers is not None
        self.target, self.data, self.bar, self.on_shard = target, data, bar, on_shard
        self.servers = Servers(data.servers, data, target.tokenizer, target.eos_ids)
        self.path, self.rows, self.failed = journal, 0, 0
        self.began = time.monotonic()

    async def all(self, shards: Mapping[int, Sequence[Conversation]]) -> None:
        async with self.servers:
            model = await self.servers.check(prompt_room(self.target, self.data) + self.data.max_new_tokens)
            self.journal = Journal(self.path, [model, self.data.top_k, self.data.top_p, self.data.max_new_tokens])
            self.gate = asyncio.Semaphore(self.servers.room)
            try:
                async with asyncio.TaskGroup() as group:
                    for number, conversations in shards.items():
                        part = _Part(number, conversations, Work(self.target, self.data))
                        for conversation in conversations:
                            await self.gate.acquire()
                            group.create_task(self._talk(part, conversation))
            finally:
                self.journal.close()

    async def _talk(self, part: _Part, conversation: Conversation) -> None:
        """All turns of one conversation; with the last conversation of its shard, the shard."""
        try:
            request = part.work.request(begin(conversation))
            while request is not None:
                reply = self.journal.find(request)
                if reply is None:
                    reply = await self.servers.answer(request)
                    if reply.finish != "error":  # to be asked again by the next run
                        self.journal.add(request, reply)
                request = self._finish(part, request, reply)
        finally:
            self.gate.release()
        part.left -= 1
        if part.left == 0:
            self.journal.sync()
            self.on_shard(part.number, part.work.done(part.conversations), time.monotonic() - part.began)

    def _finish(self, part: _Part, request: Request, reply: Reply) -> Request | None:
        self.rows += 1
        self.failed += reply.finish == "error"
        if self.rows == FIRST and self.failed > FIRST // 2:
            raise RecipeError(f"{self.failed} of the first {FIRST} prompts failed, the last with: {reply.error or 'no error'}")
        extra: dict[str, Any] = {} if reply.exact else {"exact": False}
        if reply.logprobs is not None:
            extra["logprobs"] = reply.logprobs
        following = part.work.finish(Completion(request, reply.tokens, reply.finish, error=reply.error), **extra)
        seconds = max(time.monotonic() - self.began, 1e-9)
        counts = ", ".join(f"{n} × {reason}" for reason, n in self.servers.counts.failures.items())
        lost = f"  failed: {self.failed}" if self.failed else ""
        self.bar.note = f"{self.rows / seconds:.1f} rows/s  {self.servers.in_flight} under way{lost}" + (f"  tries lost: {counts}" if counts else "")
        self.bar.advance(len(reply.tokens), 1, len(reply.tokens))
        return following


class _Part:
    """A shard under way. left: conversations that are not done."""

    def __init__(self, number: int, conversations: Sequence[Conversation], work: Work) -> None:
        self.number, self.conversations, self.work = number, conversations, work
        self.left, self.began = len(conversations), time.monotonic()


class Journal:
    """answers.jsonl: found by key, a place in the file each, so that memory holds no answers. A last line that a kill cut short is dropped."""

    def __init__(self, path: Path, settings: list[Any]) -> None:
        self.settings = settings
        self.places: dict[bytes, int] = {}
        path.touch()
        self.file = path.open("r+b")
        whole = 0
        for line in self.file:
            try:
                key = bytes.fromhex(json.loads(line)["key"])
            except (ValueError, KeyError, TypeError):
                key = b""
            if not line.endswith(b"\n"):
                break
            if key:
                self.places[key] = whole
            whole += len(line)
        self.file.seek(whole)
        self.file.truncate()

    def find(self, request: Request) -> Reply | None:
        place = self.places.get(self._key(request))
        if place is None:
            return None
        self.file.seek(place)
        return Reply(**json.loads(self.file.readline())["reply"])

    def add(self, request: Request, reply: Reply) -> None:
        key = self._key(request)
        line = json.dumps({"key": key.hex(), "id": request.id, "reply": asdict(reply)}, ensure_ascii=False) + "\n"
        self.file.seek(0, os.SEEK_END)
        self.places[key] = self.file.tell()
        self.file.write(line.encode())
        self.file.flush()

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.sync()
        self.file.close()

    def _key(self, request: Request) -> bytes:
        return bytes.fromhex(content_hash([self.settings, list(request.prompt_ids), request.temperature, request.seed]))
