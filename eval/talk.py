"""`specdec generate`: one answer, streamed, with what the drafter contributed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftheads.data.template import render
from draftheads.eval import subject
from draftheads.eval.report.tables import figure
from draftheads.inference import metrics
from draftheads.inference.decode import decode
from draftheads.inference.drafters.base import Drafter
from draftheads.inference.drafters.choose import choose
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.sampling import check
from draftheads.inference.shapes import Shape
from draftheads.inference.target import Target
from draftheads.inference.text import TextStream
from draftheads.recipes.schema import Recipe, RecipeError


@dataclass(frozen=True)
class Ask:
    """draft, copy_first: as `choose` takes them, draft "head" being the checkpoint's own head. gamma: draft length of what does not copy."""

    text: str
    system: str | None = None
    draft: str = "head"
    copy_first: str | None = None
    gamma: int = 4
    tree: Shape | None = None
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: tuple[str, ...] = ()


def talk(recipe: Recipe, folder: Path | None, ask: Ask, *, device: str | None, show_accepted: bool, silent: bool) -> dict[str, Any]:
    """Decode and print; returns {"text", "tokens", "tau", "tokens_per_s", …}. folder: of the head's checkpoint, None if there is none."""
    if not ask.text.strip():
        raise RecipeError("the prompt is empty")
    check(ask.sampling)
    target = subject.load_target(recipe.target, device=device)
    drafter = load_drafter(recipe, folder, target, ask)
    lengths = {p.name: ask.gamma for p in subject.parts(drafter) if subject.has_length(p.name, ask.tree)}
    lengths |= {name: given.gamma for name, given in (("ngram", recipe.eval.ngram), ("suffix", recipe.eval.suffix)) if name in lengths}
    plan = subject.make_plan(drafter, lengths, ask.tree)
    system = [] if ask.system is None else [{"role": "system", "content": ask.system}]
    messages = [*system, {"role": "user", "content": ask.text}]
    ids = tuple(render(target.tokenizer, messages, add_generation_prompt=True))
    limits = Limits(ask.max_new_tokens, min(len(ids) + ask.max_new_tokens + 16, target.geometry.max_positions), ask.stop)
    writer = Writer(TextStream(target.tokenizer, ask.stop), show_accepted=show_accepted, silent=silent)
    request = Request("prompt", ids, seed=ask.seed)
    done = None
    for r in decode(target, drafter, [request], ask.sampling, limits, plan=plan):
        writer.write(r.new_tokens.get("prompt", []), r.accepted.get("prompt", 0))
        done = next(iter(r.finished), done)
    writer.close()
    if done is None or done.finish_reason == "error":
        raise RecipeError(done.error if done is not None and done.error else "nothing was decoded")
    tau = metrics.tau(done.rounds) if done.rounds else None
    speed = (len(done.tokens) - 1) / done.decode_s if done.decode_s else None
    name = " + ".join(p.name for p in subject.parts(drafter))
    if not silent:
        where = target.device.type + (f", {torch.get_num_threads()} threads" if target.device.type == "cpu" else "")
        note = f"{len(done.tokens)} tokens, {done.finish_reason}; τ {figure(tau)}, {figure(speed, 1)} tokens/s, drafter {name} ({where})"
        lossy = f"; LOSSY ({ask.sampling.lossy} acceptance): not a draw from the target" if ask.sampling.lossy and ask.sampling.temperature else ""
        print(note + lossy, file=sys.stderr)
    return {
        "text": writer.text, "tokens": done.tokens, "finish_reason": done.finish_reason, "tau": tau, "tokens_per_s": speed, "drafter": name,
        "tree": subject.tree_text(plan.tree), "lossy": ask.sampling.lossy,
        "rounds": [{"source": r.source, "drafted": r.drafted, "nodes": r.nodes, "accepted": r.accepted, "emitted": r.emitted} for r in done.rounds],
    }


def load_drafter(recipe: Recipe, folder: Path | None, target: Target, ask: Ask) -> Drafter:
    if ask.draft == "head" and folder is None:
        raise RecipeError("--draft head is the checkpoint's own head: give the checkpoint, --ckpt DIR")
    draft = folder if ask.draft == "head" else ask.draft
    return choose(draft, target, copy_first=ask.copy_first, int8=subject.int8(recipe.eval, target), **subject.copying(recipe.eval))


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
