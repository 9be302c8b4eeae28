"""`specdec tree`: a static tree for a drafter, searched from the acceptance that was measured on prompts which the evaluation leaves out.

    prompts ─► the target's own answers ─► ranks of their tokens in the draft's order ─► search ─► the same behind that tree ─► search ─► FILE.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftheads.eval import subject
from draftheads.eval.calibrate import calibration_prompts
from draftheads.eval.progress import Progress
from draftheads.eval.subject import Checkpoint
from draftheads.eval.work import SPARE
from draftheads.inference.drafters.choose import choose
from draftheads.inference.requests import Limits
from draftheads.inference.shapes import Static
from draftheads.inference.tree_search import expected_tau, measure_ranks, save_tree, search_static
from draftheads.recipes.schema import RecipeError

# Prompts decoded together.
BATCH = 8


def search_tree(checkpoint: Checkpoint, *, nodes: int, depth: int, ranks: int, prompts: int, draft: str, out: Path | None, device: str | None,
                quiet: bool) -> dict[str, Any]:
    """{"file", "choices", "tree", "expected_tau": {size: τ}, "prompts"}; the file is what `static:FILE` reads. RecipeError for a drafter that
    grows no trees."""
    section = checkpoint.recipe.eval
    file = out or (checkpoint.run or checkpoint.folder) / f"tree-{nodes}.json"
    if file.suffix != ".json":
        raise RecipeError(f"--out is {file}; a tree's file ends in .json")
    chosen, others, _ = subject.read_conversations(section)
    with Progress(quiet=quiet) as progress:
        progress.stage(f"loading {checkpoint.recipe.target.name} and {checkpoint.name}", 1, "models")
        target = subject.load_target(checkpoint.recipe.target, device=device)
        drafter = choose(checkpoint.folder if draft == "head" else draft, target, int8=subject.int8(section, target))
        room = section.max_new_tokens + SPARE
        found = calibration_prompts(target, others, checkpoint, subject.render_prompts(target, chosen, room), room, prompts)
        progress.finish()
        requests = [subject.request(p, section.seed) for p in found]
        limits = Limits(section.max_new_tokens, min(max(len(p.ids) for p in found) + room, target.geometry.max_positions))
        tree: Static | None = None
        for title in ("ranks of the target's tokens in the draft's order", "the same behind the tree that was found"):
            progress.stage(title, 1, "passes")
            counts = measure_ranks(target, drafter, requests, depth, ranks, tree=tree, sampling=subject.sampling(section), limits=limits,
                                   batch_size=min(BATCH, len(requests)))
            tree = search_static(counts.acceptance_DR, nodes)
            progress.finish()
    assert tree is not None
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < nodes] + [nodes]
    expected = {n: expected_tau(search_static(counts.acceptance_DR, n), counts.acceptance_DR) for n in sizes}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_tree(file, tree, counts.acceptance_DR, target=target.name, drafter=drafter.name, checkpoint=checkpoint.name, prompts=len(found))
    choices = [list(path) for path in tree.ordered]
    return {"file": str(file), "choices": choices, "tree": f"static:{file}", "expected_tau": expected, "prompts": len(found)}


def print_tree(found: dict[str, Any]) -> None:
    for size, tau in found["expected_tau"].items():
        print(f"{size:4d} nodes   τ {tau:.2f} expected")
    depth = max(map(len, found["choices"]))
    print(f"{len(found['choices'])} nodes, {depth} deep, from {found['prompts']} prompts; use it as a tree: static:{found['file']}")
