"""What an evaluation writes while it runs: one JSON line per block, so that a killed run goes on where it stopped.

    line 1   {"kind": "settings", …}      another evaluation's file is not continued, but set aside as records.<hash>.jsonl
    line 2   {"kind": "costs", …}         measured costs and the γ they chose: a resumed run keeps them
    then     {"kind": "block", …}         one block of prompts, run by every contender
             {"kind": "untimed", …}       one drafter's acceptance at eval.tau_gamma

A block is complete or absent: a line that a kill cut short is dropped, and the block is run again by all contenders, so pairs stay pairs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftheads.inference.measure import Timed
from draftheads.inference.requests import Completion, Request, RoundStat
from draftheads.recipes.files import sha256_file

TRANSFORMERS = "transformers"


@dataclass
class Block:
    """Prompts of one category that were timed as one unit, and what every contender (drafters, "transformers") did with them.

    differences: one dict per compared pair and prompt, see lossless.Divergence, with "id", "category" and "pair" ("none/head") added.
    """

    index: int
    category: str
    ids: list[str]
    prompt_tokens: list[int]
    runs: dict[str, Timed] = field(default_factory=dict)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index, "category": self.category, "ids": self.ids, "prompt_tokens": self.prompt_tokens,
            "runs": {name: timed_to_json(t) for name, t in self.runs.items()}, "differences": self.differences,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Block:
        runs = {name: timed_from_json(t, value["ids"]) for name, t in value["runs"].items()}
        return cls(value["index"], value["category"], value["ids"], value["prompt_tokens"], runs, value["differences"])


def timed_to_json(timed: Timed) -> dict[str, Any]:
    rows = [
        {
            "tokens": c.tokens, "finish": c.finish_reason, "text": c.text,
            "rounds": [[r.drafted, r.nodes, r.accepted, r.emitted, r.source] for r in c.rounds],
            "certificate": [c.logprob_sum, c.entropy_sum, c.variance_sum],
        }
        for c in timed.completions
    ]
    return {"decode_s": timed.decode_s, "prefill_s": timed.prefill_s, "rows": rows}


def timed_from_json(value: dict[str, Any], ids: Sequence[str]) -> Timed:
    done = []
    for name, row in zip(ids, value["rows"], strict=True):
        logprob, entropy, variance = row["certificate"]
        done.append(
            Completion(
                Request(name, ()), row["tokens"], row["finish"], [RoundStat(*r) for r in row["rounds"]], text=row["text"],
                logprob_sum=logprob, entropy_sum=entropy, variance_sum=variance,
            )
        )
    return Timed(done, value["decode_s"], value["prefill_s"])


class Journal:
    """The file. `entries` holds what was already there when it was opened with the same settings."""

    def __init__(self, path: Path, settings: dict[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        settings = json.loads(json.dumps(settings))
        found, length = _read(path)
        if not fresh and found and found[0] == {"kind": "settings", **settings}:
            self.entries = found[1:]
            os.truncate(path, length)  # a cut last line would glue itself to the next one
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if found:  # hours of measuring: kept, by its content, so that nothing set aside is ever overwritten by something else
            os.replace(path, path.with_name(f"{path.stem}.{sha256_file(path)[:12]}{path.suffix}"))
        path.write_text("")
        self._write({"kind": "settings", **settings})

    def append(self, kind: str, value: dict[str, Any]) -> None:
        self._write({"kind": kind, **value})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.entries if e["kind"] == kind]

    def _write(self, entry: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(entry, ensure_ascii=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The complete entries of a journal, the settings first."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The complete lines and their length in bytes."""
    entries: list[dict[str, Any]] = []
    length = 0
    if path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not isinstance(entry, dict) or "kind" not in entry:
                break
            entries.append(entry)
            length += len(line)
    return entries, length
