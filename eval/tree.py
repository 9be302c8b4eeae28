"""`specdec tree`: a static tree for a drafter, searched from the acceptance that was measured on prompts which the evaluation leaves out.

    prompts ─► the target's own answers ─► ranks of their tokens in the draft's order ─► search ─► the same behind that tree ─► search ─► FILE.json
    prompts ─► what drafting and verifying cost on this machine ─► Costs ─┘ (how many nodes pay)                              └─► speed-up per size
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftheads.eval import calibrate, subject
from draftheads.eval.calibrate import calibration_prompts, middling
from draftheads.eval.cost_model import Costs
from draftheads.eval.progress import Progress
from draftheads.eval.subject import Checkpoint, Prompt
from draftheads.eval.work import SPARE
from draftheads.inference import measure
from draftheads.inference.drafters.base import Drafter
from draftheads.inference.drafters.choose import choose
from draftheads.inference.requests import Limits
from draftheads.inference.target import Target, load_target
from draftheads.inference.tree_search import Found, choose_static, measure_ranks, predict_static, save_tree, search_static
from draftheads.recipes.schema import RecipeError

# Prompts decoded together while ranks are taken.
BATCH = 8
# Sizes that are compared, and the most that "auto" chooses: no published tree has more. v(w) is measured at these widths − 1.
SIZES = (1, 2, 4, 8, 16, 32, 64)


def search_tree(checkpoint: Checkpoint, *, nodes: int | None, depth: int, ranks: int, prompts: int, draft: str, out: Path | None, device: str | None,
                quiet: bool) -> dict[str, Any]:
    """nodes: of the tree; None: as many as make it fastest by this machine's costs, at most 64.

    {"file", "choices", "tree", "expected_tau": {size: τ}, "speedup": {size: predicted, against no drafts}, "costs", "prompts"}, the tree that was
    saved among the sizes; the file is what `static:FILE` reads. RecipeError for a drafter that grows no trees.
    """
    section = checkpoint.recipe.eval
    file = out or (checkpoint.run or checkpoint.folder) / f"tree-{'auto' if nodes is None else nodes}.json"
    if file.suffix != ".json":
        raise RecipeError(f"--out is {file}; a tree's file ends in .json")
    chosen, others, _ = subject.read_conversations(section)
    with Progress(quiet=quiet) as progress:
        progress.stage(f"loading {checkpoint.recipe.target.name} and {checkpoint.name}", 1, "models")
        target = load_target(checkpoint.recipe.target, checkpoint.adapter, device=device)
        drafter = choose(checkpoint.folder if draft == "head" else draft, target, int8=subject.int8(section, target))
        room = section.max_new_tokens + SPARE
        found = calibration_prompts(target, others, checkpoint, subject.render_prompts(target, chosen, room), room, prompts)
        progress.finish()
        requests = [subject.request(p, section.seed) for p in found]
        limits = Limits(section.max_new_tokens, min(max(len(p.ids) for p in found) + room, target.geometry.max_positions))
        best: Found | None = None
        costs: Costs | None = None
        for title in ("ranks of the target's tokens in the draft's order", "the same behind the tree that was found"):
            progress.stage(title, 1, "passes")
            counts = measure_ranks(target, drafter, requests, depth, ranks, tree=best.shape if best else None, sampling=subject.sampling(section),
                                   limits=limits, batch_size=min(BATCH, len(requests)))
            progress.finish()
            # After the ranks, which refuse drafters that grow no trees.
            costs = costs or _measure_costs(target, drafter, middling(found, section.batch_size), section.seed, progress)
            priced = (costs.verify, costs.c.get(drafter.name, 0.0), costs.o.get(drafter.name, 0.0))
            table = counts.acceptance_DR
            best = choose_static(table, *priced, most=SIZES[-1]) if nodes is None else predict_static(search_static(table, nodes), table, *priced)
    assert best is not None and costs is not None
    sizes = {n: predict_static(search_static(table, n), table, *priced) for n in SIZES if nodes is None or n < nodes}
    sizes[nodes or best.shape.nodes] = best
    file.parent.mkdir(parents=True, exist_ok=True)
    save_tree(file, best.shape, table, target=target.name, drafter=drafter.name, checkpoint=checkpoint.name, prompts=len(found), speedup=best.speedup,
              costs=costs.to_json())
    return {
        "file": str(file), "choices": [list(path) for path in best.shape.ordered], "tree": f"static:{file}",
        "expected_tau": {n: sizes[n].expected_tau for n in sorted(sizes)}, "speedup": {n: sizes[n].speedup for n in sorted(sizes)},
        "costs": costs.to_json(), "prompts": len(found),
    }


def _measure_costs(target: Target, drafter: Drafter, prompts: list[Prompt], seed: int, progress: Progress) -> Costs:
    """At the evaluation's batch size. The drafter's are those of chains: a step that drafts a wide level costs a little more."""
    gammas, repeats = calibrate.TIMED[drafter.name], calibrate.REPEATS
    progress.stage("measuring what drafting and verifying cost", repeats * (1 + len(SIZES) + len(gammas)), "passes")
    samples = measure.sample_costs(target, {drafter.name: (drafter, gammas)}, [subject.request(p, seed) for p in prompts], fillers=SIZES,
                                   rounds=calibrate.ROUNDS, repeats=repeats, on_pass=lambda: progress.advance(1))
    progress.finish()
    return Costs.from_json(measure.fit_costs(samples))


def print_tree(found: dict[str, Any]) -> None:
    for size, tau in found["expected_tau"].items():
        print(f"{size:4d} nodes   τ {tau:.2f} expected   {found['speedup'][size]:.2f}× predicted")
    depth = max(map(len, found["choices"]))
    print(f"{len(found['choices'])} nodes, {depth} deep, from {found['prompts']} prompts; use it as a tree: static:{found['file']}")
