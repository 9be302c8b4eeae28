"""OpenAI-compatible servers (vLLM, SGLang, any other) as one engine: a prompt's ids ─► the least busy server ─► the answer's ids.

    check      every server is there, serves the model, has room for prompt and answer: before any long work
    answer     POST /v1/completions with the prompt as token ids; the reply's own token_ids where the server returns them (vLLM#22587,
               sglang#30917), else its text, tokenised again, and the row says so. A server that refuses what OpenAI's own interface lacks is
               asked without it
    waiting    a busy or absent server (429, 503, no connection) is left alone for a while and costs a prompt none of its retries; other failures
               (timeouts, 5xx) do. A refusal (4xx) is that prompt's failure at once

The api key is read from the environment, sent, and never written or shown.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any, Self

from draftheads.inference.requests import Request
from draftheads.recipes.schema import DataSection, RecipeError, ServersSection

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
CHECK_TIMEOUT_S = 15.0
BUSY = (429, 503)


class Away(RecipeError):
    """No server has answered for too long."""


@dataclass
class Reply:
    """tokens: the answer's ids, the end token included; finish: eos, length or error; exact: the ids are the server's own."""

    tokens: list[int]
    finish: str
    exact: bool = True
    error: str | None = None
    logprobs: list[float] | None = None


@dataclass
class _Server:
    url: str
    busy: int = 0
    away_until: float = 0.0
    waits: int = 0
    plain: bool = False  # takes nothing beyond OpenAI's own
    model: str = ""


@dataclass
class Counts:
    """For the status line: tries that failed, by reason."""

    failures: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


class Servers:
    """Use as an async context. tokenizer, eos_ids: the target's. The methods raise RecipeError before long work, Away during it."""

    def __init__(self, section: ServersSection, data: DataSection, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        try:
            import httpx
        except ImportError:
            raise RecipeError("data.servers needs httpx: pip install 'draftheads[server]'") from None
        self._httpx = httpx
        self.section, self.data, self.tokenizer, self.eos_ids = section, data, tokenizer, eos_ids
        self.counts = Counts()
        self._servers = [_Server(url.rstrip("/")) for url in section.urls]
        self._answered = time.monotonic()
        self._free = asyncio.Condition()

    @property
    def room(self) -> int:
        """How many prompts may be under way."""
        return self.section.concurrency * len(self._servers)

    @property
    def in_flight(self) -> int:
        return sum(s.busy for s in self._servers)

    async def __aenter__(self) -> Self:
        key = os.environ.get(self.section.api_key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=self.room)
        self._client = self._httpx.AsyncClient(headers=headers, timeout=self.section.timeout_s, limits=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def check(self, longest: int) -> str:
        """-> the model's name, the same on all servers. longest: tokens that a prompt and its answer may have together."""
        for server in self._servers:
            server.model = await self._served(server, longest)
        names = {s.model for s in self._servers}
        if len(names) > 1:
            raise RecipeError(f"data.servers: they serve different models ({', '.join(sorted(names))}): name one in data.servers.model")
        return names.pop()

    async def _served(self, server: _Server, longest: int) -> str:
        try:
            reply = await self._client.get(f"{server.url}/models", timeout=CHECK_TIMEOUT_S)
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError) as error:
            raise RecipeError(f"data.servers: no server answers at {server.url} ({_name(error)}): start it, or mend the URL, which ends with /v1"
                              ) from None
        if reply.status_code in (401, 403):
            raise RecipeError(f"data.servers: {server.url} refuses the key ({reply.status_code}): put it into the environment variable "
                              f"{self.section.api_key_env}")
        try:
            listed = {str(m["id"]): m for m in reply.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise RecipeError(f"data.servers: {server.url}/models is no OpenAI-compatible list (status {reply.status_code}): the URL ends with /v1"
                              ) from None
        name = self.section.model or (next(iter(listed)) if len(listed) == 1 else None)
        if name is None or name not in listed:
            raise RecipeError(f"data.servers: {server.url} serves {', '.join(listed) or 'no model'}: name one of them in data.servers.model")
        room = listed[name].get("max_model_len")
        if isinstance(room, int) and room < longest:
            raise RecipeError(f"data.servers: {server.url} serves {room} tokens (max_model_len), a prompt and its answer may have {longest}: lower "
                              "data.max_prompt_tokens or data.max_new_tokens, or start it with more")
        return name

    async def answer(self, request: Request) -> Reply:
        """One prompt, with retries. Never raises for what one prompt met; Away where no server answers any more."""
        tries, reason, plain = 0, "", False
        while tries <= self.section.retries:
            server = await self._take()
            plain = plain or server.plain
            try:
                reply = await self._client.post(f"{server.url}/completions", json=self._body(request, server.model, plain))
                status = reply.status_code
                if status == 200:
                    read = self._read(reply, request)
                    self._answers(server)
                    server.plain = plain  # only now: a refusal may have been this prompt's own
                    return read
                reason = f"{status}: {_message(reply)}"
                if status in BUSY:
                    self._rest(server, _seconds(reply.headers.get("retry-after")))
                    self.counts.add(str(status))
                    continue
                self._answers(server)
                if status in (400, 422) and not plain:
                    plain = True
                    continue
                if status < 500:
                    return Reply([], "error", error=reason)
                self.counts.add(str(status))
            except self._httpx.TimeoutException as error:
                if isinstance(error, self._httpx.ConnectTimeout):
                    self._rest(server)
                    self.counts.add("no connection")
                    continue
                reason = f"no answer in {self.section.timeout_s:g} s"
                self.counts.add("timeout")
            except self._httpx.ConnectError:
                self._rest(server)
                self.counts.add("no connection")
                continue
            except (self._httpx.TransportError, OSError) as error:  # it broke off: this prompt may be what breaks it
                reason = _name(error)
                self._rest(server)
                self.counts.add("connection lost")
            except _Unreadable as error:
                reason = str(error)
                self.counts.add("unreadable")
            finally:
                await self._give_back(server)
            tries += 1
            await asyncio.sleep(_wait(tries))
        return Reply([], "error", error=f"{reason} ({tries} tries)")

    # ---- which server

    async def _take(self) -> _Server:
        """The least busy server that is there and has room. Away after patience_s without an answer from any."""
        async with self._free:
            while True:
                now = time.monotonic()
                there = [s for s in self._servers if s.away_until <= now and s.busy < self.section.concurrency]
                if there:
                    server = min(there, key=lambda s: s.busy)
                    server.busy += 1
                    return server
                absent = [s for s in self._servers if s.away_until > now]
                if len(absent) == len(self._servers) and now - self._answered > self.section.patience_s:
                    names = ", ".join(s.url for s in self._servers)
                    raise Away(f"no server has answered for {self.section.patience_s:g} s ({names}): start them and run the same command again; "
                               "what is answered is kept")
                back = min((s.away_until for s in absent), default=now + 1.0)
                try:
                    await asyncio.wait_for(self._free.wait(), max(0.01, min(back - now, 1.0)))
                except TimeoutError:
                    pass

    async def _give_back(self, server: _Server) -> None:
        async with self._free:
            server.busy -= 1
            self._free.notify_all()

    def _answers(self, server: _Server) -> None:
        self._answered, server.waits, server.away_until = time.monotonic(), 0, 0.0

    def _rest(self, server: _Server, seconds: float | None = None) -> None:
        """Of all that fail at a server at one time, the first makes it rest."""
        now = time.monotonic()
        if server.away_until <= now:
            server.waits += 1
            server.away_until = now + (seconds if seconds is not None else _wait(server.waits))

    # ---- what is sent and read

    def _body(self, request: Request, model: str, plain: bool) -> dict[str, Any]:
        """plain: without what OpenAI's own interface does not have."""
        data = self.data
        body: dict[str, Any] = {
            "model": model, "prompt": list(request.prompt_ids), "max_tokens": data.max_new_tokens, "stream": False,
            "temperature": float(request.temperature or 0), "top_p": data.top_p, "seed": request.seed % 2**31,
        }
        if self.section.logprobs:
            body["logprobs"] = 1
        if not plain:
            body |= {"return_token_ids": True, "stop_token_ids": sorted(self.eos_ids), "skip_special_tokens": False}
            if data.top_k:
                body["top_k"] = data.top_k
        return body

    def _read(self, reply: Any, request: Request) -> Reply:
        try:
            choice = reply.json()["choices"][0]
            finish, text = choice["finish_reason"], choice.get("text") or ""
            tokens, sent = choice.get("token_ids"), choice.get("prompt_token_ids")
            if sent is not None and list(sent) != list(request.prompt_ids):
                return Reply([], "error", error="the server changed the prompt's ids: it serves another tokenizer than the target's")
            exact = tokens is not None
            tokens = [int(t) for t in tokens] if exact else self._encode(text)
            logprobs = ((choice.get("logprobs") or {}).get("token_logprobs")) if self.section.logprobs else None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _Unreadable(f"a reply that is no completion ({_name(error)})") from None
        if finish == "length":
            return Reply(tokens, "length", exact, logprobs=logprobs)
        if finish not in ("stop", "stop_token", "eos_token"):
            return Reply(tokens, "error", exact, error=f"the server ended with {finish!r}")
        end = next((i for i, t in enumerate(tokens) if t in self.eos_ids), None)
        if end is None:  # servers that stop without showing where
            stop = choice.get("stop_reason")
            tokens.append(stop if isinstance(stop, int) and stop in self.eos_ids else self._end())
            end = len(tokens) - 1
        return Reply(tokens[: end + 1], "eos", exact, logprobs=logprobs)

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _end(self) -> int:
        own = self.tokenizer.eos_token_id
        return int(own) if own in self.eos_ids else min(self.eos_ids)


class _Unreadable(Exception):
    pass


def _wait(times: int) -> float:
    """Exponential, with jitter: what failed together should not come back together."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (times - 1)) * random.uniform(0.5, 1.5))


def _seconds(header: str | None) -> float | None:
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(header))) if header is not None else None
    except ValueError:  # a date
        return None


def _message(reply: Any) -> str:
    """What the server says of a refusal, short and in one line."""
    try:
        body = reply.json()
        found = body.get("message") or (body.get("error") or {}).get("message") or body.get("detail") or body
    except (ValueError, AttributeError):
        found = reply.text
    return " ".join(str(found).split())[:160]


def _name(error: BaseException) -> str:
    text = " ".join(str(error).split())[:120]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
