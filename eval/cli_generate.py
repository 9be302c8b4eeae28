"""`specdec generate` and `specdec tree`, with the options that all commands share. As in cli.py, torch waits until a command runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from draftheads.inference.checkpoints import find_folder
from draftheads.inference.shapes import MOST_NODES, parse_shape
from draftheads.recipes.schema import Recipe, RecipeError, apply_override, validate

SetOption = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the recipe; may be repeated.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines on stdout.")]
CkptOption = Annotated[Path, typer.Option("--ckpt", help="Checkpoint folder, or run folder (then ckpt/final).")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; default: a GPU if there is one.")]
COPYING = ("ngram", "suffix", "none")


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say; '-' reads it from stdin.")],
    ckpt: Annotated[Path | None, typer.Option("--ckpt", help="Checkpoint folder, or run folder: names the target, brings the head.")] = None,
    target: Annotated[str | None, typer.Option(help="Without a checkpoint: the target. --draft then defaults to suffix.")] = None,
    draft: Annotated[str | None, typer.Option(help="head (the checkpoint's), none, ngram, suffix, mtp; or a folder or Hub id: another "
                                                   "head, or a smaller model with the target's tokenizer.")] = None,
    copy_first: Annotated[str | None, typer.Option(help="ngram, suffix or none: what copies before a head or a model. Default: ngram if neither "
                                                        "--draft nor --target is given, else none.")] = None,
    gamma: Annotated[int, typer.Option(help="Draft length of a head or a model.", min=1, max=MOST_NODES)] = 4,
    tree: Annotated[str, typer.Option(help="Instead of a chain: `dynamic:depth=5,top_k=8,nodes=24`, `static:FILE.json` (by "
                                           "`specdec tree`), `sampled:3,2,1`. A head, a model and mtp can, suffix a dynamic one; ngram "
                                           "ignores it.")] = "chain",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest; 0: off.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest that make up p, above 0 and at most 1.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out what is less likely than p times the likeliest.", min=0, max=1)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that were there are less likely.")] = 1.0,
    no_repeat_ngram_size: Annotated[int, typer.Option(help="No n tokens twice; 0: off.", min=0)] = 0,
    min_new_tokens: Annotated[int, typer.Option(help="Do not end before.", min=0)] = 0,
    lossy: Annotated[str | None, typer.Option(help="`typical`: accept drafts that are likely enough; no longer a draw from the target.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    stop: Annotated[list[str], typer.Option("--stop", help="Stop at this text; may be repeated.")] = [],  # noqa: B006
    show_accepted: Annotated[bool, typer.Option("--show-accepted", help="Colour the tokens that were drafted and accepted.")] = False,
    device: DeviceOption = None,
    overrides: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt with the target and a drafter; the text streams, τ and tokens/s follow on stderr.

        specdec generate --ckpt runs/smollm2-135m "Write a haiku about queues."

        specdec generate --ckpt runs/smollm2-135m --show-accepted "Repeat: one two three four"

        specdec generate --ckpt runs/smollm2-135m --copy-first suffix --tree dynamic:depth=4,top_k=4,nodes=12 "Name three rivers."

        specdec generate --target smollm2-135m --draft suffix --temperature 0.7 --min-p 0.05 "Tell me a story."

        cat question.txt | specdec generate --ckpt runs/smollm2-135m -
    """
    if (ckpt is None) == (target is None):
        raise RecipeError("give a checkpoint (--ckpt DIR), or a target without one (--target NAME)")
    if copy_first is not None and copy_first not in COPYING:
        raise RecipeError(f"--copy-first is {copy_first!r}; wanted one of {', '.join(COPYING)}")
    shape = parse_shape(tree)
    for name, value in (("the prompt", prompt), ("--system", system or ""), *(("--stop", s) for s in stop)):
        if name == "--stop" and not value:
            raise RecipeError("--stop is empty: every answer would end at once")
        _text(name, value)
    if ckpt is not None:
        find_folder(ckpt.expanduser())
    recipe, folder = _subject(ckpt, target, overrides)
    from draftheads.eval.run import silence
    from draftheads.eval.talk import Ask, talk
    from draftheads.inference.requests import Sampling

    silence()
    if copy_first is None:
        copy_first = "ngram" if draft is None and target is None else "none"
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size, min_new_tokens, lossy)
    ask = Ask(
        _text("the prompt", _stdin()) if prompt == "-" else prompt, system, draft or ("head" if target is None else "suffix"),
        None if copy_first == "none" else copy_first, gamma, shape, max_new_tokens, sampling, seed, tuple(stop),
    )
    found = talk(recipe, folder, ask, device=device, show_accepted=show_accepted, silent=as_json)
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))


def tree(
    ckpt: CkptOption,
    nodes: Annotated[str, typer.Option(help="Nodes of the tree, the root not counted; auto: as many, up to 64, as make it fastest by the costs that "
                                            "are measured on this machine.")] = "auto",
    depth: Annotated[int, typer.Option(help="Deepest level that is measured.", min=1, max=MOST_NODES)] = 6,
    ranks: Annotated[int, typer.Option(help="How many of the draft's likeliest tokens are considered at each node.", min=1)] = 8,
    prompts: Annotated[int, typer.Option(help="How many prompts to measure on: held-out ones that the evaluation leaves out.", min=1)] = 28,
    draft: Annotated[str, typer.Option(help="head (the checkpoint's), mtp, or a folder or Hub id of a smaller model.")] = "head",
    out: Annotated[Path | None, typer.Option(help="The file; default: tree-NODES.json in the run's folder.")] = None,
    device: DeviceOption = None,
    overrides: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Search a static tree from measured acceptance (Medusa §2.3.3); print the τ to expect from each size and the speed-up that this machine's costs
    predict. The size is as much the machine's choice as the head's: more nodes are more τ, and dearer to verify. Without --nodes it is chosen so.

        specdec tree --ckpt runs/smollm2-135m

        specdec tree --ckpt runs/smollm2-135m --nodes 16

        specdec-eval --ckpt runs/smollm2-135m --tree static:runs/smollm2-135m/tree-auto.json --out runs/tree
    """
    size = None if nodes == "auto" else int(nodes) if nodes.isdecimal() else 0
    if size is not None and not 1 <= size <= MOST_NODES:
        raise RecipeError(f"--nodes is {nodes!r}; wanted 'auto', or a whole number of 1 … {MOST_NODES}")
    find_folder(ckpt.expanduser())
    from draftheads.eval.run import silence
    from draftheads.eval.subject import open_checkpoint
    from draftheads.eval.tree import print_tree, search_tree

    silence()
    found = search_tree(open_checkpoint(ckpt, overrides), nodes=size, depth=depth, ranks=ranks, prompts=prompts, draft=draft, out=out, device=device,
                        quiet=as_json)
    print(json.dumps(found, indent=2)) if as_json else print_tree(found)


def _subject(ckpt: Path | None, target: str | None, overrides: list[str]) -> tuple[Recipe, Path | None]:
    """The recipe that holds here, and the head's folder."""
    if ckpt is not None:
        from draftheads.eval.subject import open_checkpoint

        checkpoint = open_checkpoint(ckpt, overrides)
        return checkpoint.recipe, checkpoint.folder
    raw: dict[str, Any] = {"target": {"name": target}, "head": {}}
    for item in overrides:
        apply_override(raw, item)
    recipe: Recipe = validate(Recipe, raw, "options")
    return recipe, None


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RecipeError(f"stdin is not UTF-8 text: {error}") from None


def _text(name: str, value: str) -> str:
    if not value.isascii() and value != value.encode(errors="replace").decode():
        raise RecipeError(f"{name} holds bytes that are no UTF-8 text")
    return value


def here(name: str) -> str:
    """A path on the command line is relative to the working directory, not to the recipe."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def from_here(prompts: str) -> str:
    """The same for prompts, where a file that is missing is a path all the same."""
    path = Path(prompts).expanduser()
    return str(path.absolute()) if prompts != "builtin" and (path.exists() or path.suffix in (".jsonl", ".json", ".parquet")) else prompts
