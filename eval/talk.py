"""`specdec generate`: one answer, streamed, with what the drafter contributed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftheads.eval import subject
from draftheads.eval.report.tables import figure
from draftheads.heads.checkpoint import adapter_of, read_meta
from draftheads.inference import metrics
from draftheads.inference.api import SpeculativeDecoder, encode
from draftheads.inference.drafters.base import Drafter
from draftheads.inference.drafters.choose import check_draft, choose
from draftheads.inference.requests import Limits, Sampling
from draftheads.inference.sampling import check
from draftheads.inference.shapes import Shape
from draftheads.inference.target import Target, load_target
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
    check_draft(named_draft(folder, ask), ask.copy_first)
    target = load_target(recipe.target, None if folder is None else adapter_of(folder, read_meta(folder)), device=device)
    # A drafter made here, not a name for the decoder to choose by: how it copies, and whether a head drafts in int8, is what the recipe says, as in
    # specdec-eval. The library knows no recipe.
    drafter = load_drafter(recipe, folder, target, ask)
    decoder = SpeculativeDecoder(target, drafter, gamma=ask.gamma, tree=ask.tree)
    system = [] if ask.system is None else [{"role": "system", "content": ask.system}]
    messages = [*system, {"role": "user", "content": ask.text}]
    ids = encode(target, messages)
    limits = Limits(ask.max_new_tokens, len(ids) + ask.max_new_tokens, ask.stop)
    writer = Writer(TextStream(target.tokenizer, ask.stop), show_accepted=show_accepted, silent=silent)
    for round_, _ in decoder.stream_rounds(ids, ask.sampling, limits, seed=ask.seed):
        # The piece of text is the whole round's, and a colour is one token's: the writer has a stream of its own.
        for id_, tokens in round_.new_tokens.items():
            writer.write(tokens, round_.accepted.get(id_, 0))
    writer.close()
    done = decoder.last
    if done is None or done.finish_reason == "error":
        raise RecipeError(done.error if done is not None and done.error else "nothing was decoded")
    grows = [p.name for p in subject.parts(drafter) if p.name != "none" and not subject.has_length(p.name, ask.tree)]
    tau = metrics.tau(done.rounds) if done.rounds else None
    speed = (len(done.tokens) - 1) / done.decode_s if done.decode_s else None
    name = " + ".join(p.name for p in subject.parts(drafter))
    if not silent:
        where = target.device.type + (f", {torch.get_num_threads()} threads" if target.device.type == "cpu" else "")
        note = f"{len(done.tokens)} tokens, {done.finish_reason}; τ {figure(tau)}, {figure(speed, 1)} tokens/s, drafter {name} ({where})"
        lossy = f"; LOSSY ({ask.sampling.lossy} acceptance): not a draw from the target" if ask.sampling.lossy and ask.sampling.temperature else ""
        print(note + lossy, file=sys.stderr)
    return {
        "text": done.text, "tokens": done.tokens, "finish_reason": done.finish_reason, "tau": tau, "tokens_per_s": speed, "drafter": name,
        "tree": subject.tree_text(ask.tree) if grows else None, "lossy": ask.sampling.lossy,
        "rounds": [{"source": r.source, "drafted": r.drafted, "nodes": r.nodes, "accepted": r.accepted, "emitted": r.emitted} for r in done.rounds],
    }


def named_draft(folder: Path | None, ask: Ask) -> Path | str | None:
    if ask.draft == "head" and folder is None:
        raise RecipeError("--draft head is the checkpoint's own head: give the checkpoint, --ckpt DIR")
    return folder if ask.draft == "head" else ask.draft


def load_drafter(recipe: Recipe, folder: Path | None, target: Target, ask: Ask) -> Drafter:
    return choose(named_draft(folder, ask), target, copy_first=ask.copy_first, int8=subject.int8(recipe.eval, target), **subject.copying(recipe.eval))


class Writer:
    """Shows the text that is certain, as it comes. A piece that was held back has the colour of the token that completed it."""

    def __init__(self, stream: TextStream, *, show_accepted: bool, silent: bool) -> None:
        from rich.console import Console

        self.stream, self.show, self.silent = stream, show_accepted, silent
        self.console = Console(highlight=False, soft_wrap=True)

    def write(self, tokens: list[int], accepted: int) -> None:
        for i, token in enumerate(tokens):
            self._show(self.stream.push([token]), i < accepted)

    def close(self) -> None:
        self._show(self.stream.finish(), False)
        self._show("\n", False)

    def _show(self, piece: str, drafted: bool) -> None:
        if self.silent or not piece:
            return
        if self.show:
            from rich.text import Text

            self.console.print(Text(piece, style="black on green" if drafted else ""), end="")
        else:
            print(piece, end="", flush=True)
