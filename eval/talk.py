"""`specdec generate`: one answer, streamed, with what the drafter contributed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from draftheads.data.template import render
from draftheads.eval import subject
from draftheads.eval.report.tables import figure
from draftheads.inference import metrics
from draftheads.inference.decode import decode
from draftheads.inference.drafters.base import Plan
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.text import TextStream
from draftheads.recipes.schema import RecipeError

DRAFTERS = ("none", "ngram", "head", "composite")


@dataclass(frozen=True)
class Ask:
    text: str
    system: str | None = None
    drafter: str = "composite"
    gamma: int = 4
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


def talk(checkpoint: subject.Checkpoint, ask: Ask, *, device: str | None, show_accepted: bool, silent: bool) -> dict[str, Any]:
    """Decode and print; returns {"text", "tokens", "tau", "tokens_per_s", …}."""
    if ask.drafter not in DRAFTERS:
        raise RecipeError(f"--drafter is {ask.drafter!r}; wanted one of {', '.join(DRAFTERS)}")
    if not ask.text.strip():
        raise RecipeError("the prompt is empty")
    target = subject.load_target(checkpoint, device=device)
    section = checkpoint.recipe.eval
    drafter = subject.load_drafters(checkpoint, target, [ask.drafter], section.ngram)[ask.drafter]
    lengths = {"ngram": section.ngram.gamma} | ({"head": ask.gamma} if ask.drafter != "ngram" else {})
    gamma = subject.set_gamma(drafter, lengths)
    system = [] if ask.system is None else [{"role": "system", "content": ask.system}]
    messages = [*system, {"role": "user", "content": ask.text}]
    ids = tuple(render(target.tokenizer, messages, add_generation_prompt=True))
    limits = Limits(ask.max_new_tokens, min(len(ids) + ask.max_new_tokens + 16, target.geometry.max_positions), ask.stop)
    writer = Writer(TextStream(target.tokenizer, ask.stop), show_accepted=show_accepted, silent=silent)
    request = Request("prompt", ids, seed=ask.seed)
    done = None
    for r in decode(target, drafter, [request], Sampling(ask.temperature, ask.top_k, ask.top_p), limits, plan=Plan(gamma=gamma)):
        writer.write(r.new_tokens.get("prompt", []), r.accepted.get("prompt", 0))
        done = next(iter(r.finished), done)
    writer.close()
    if done is None or done.finish_reason == "error":
        raise RecipeError(done.error if done is not None and done.error else "nothing was decoded")
    tau = metrics.tau(done.rounds) if done.rounds else None
    speed = (len(done.tokens) - 1) / done.decode_s if done.decode_s else None
    if not silent:
        where = target.device.type + (f", {torch.get_num_threads()} threads" if target.device.type == "cpu" else "")
        note = f"{len(done.tokens)} tokens, {done.finish_reason}; τ {figure(tau)}, {figure(speed, 1)} tokens/s, drafter {ask.drafter} ({where})"
        print(note, file=sys.stderr)
    return {
        "text": writer.text, "tokens": done.tokens, "finish_reason": done.finish_reason, "tau": tau, "tokens_per_s": speed,
        "rounds": [{"source": r.source, "drafted": r.drafted, "accepted": r.accepted, "emitted": r.emitted} for r in done.rounds],
    }


class Writer:
    """Shows the text that is certain, as it comes. A piece that was held back has the colour of the token that completed it."""

    def __init__(self, stream: TextStream, *, show_accepted: bool, silent: bool) -> None:
        from rich.console import Console

        self.stream, self.show, self.silent = stream, show_accepted, silent
        self.console = Console(highlight=False, soft_wrap=True)
        self.text = ""

    def write(self, tokens: list[int], accepted: int) -> None:
        for i, token in enumerate(tokens):
            self._show(self.stream.push([token]), i < accepted)

    def close(self) -> None:
        self._show(self.stream.finish(), False)
        self._print("\n", False)

    def _show(self, piece: str, drafted: bool) -> None:
        self.text += piece
        self._print(piece, drafted)

    def _print(self, piece: str, drafted: bool) -> None:
        if self.silent or not piece:
            return
        if self.show:
            from rich.text import Text

            self.console.print(Text(piece, style="black on green" if drafted else ""), end="")
        else:
            print(piece, end="", flush=True)
