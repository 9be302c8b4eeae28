"""Costs of this machine and the draft lengths they call for, from prompts that are not evaluated.

    calibration prompts ─► t_verify(w), draft step, overhead (inference/measure.py) ─► Costs
                        ─► every drafter once with long drafts ─► rounds ─► cut to each γ, priced by Costs ─► the γ of the timed runs
"""

from __future__ import annotations

from typing import Any

from draftheads.data.conversations import Conversation
from draftheads.data.select import recipe_prompts
from draftheads.eval import subject
from draftheads.eval.cost_model import Costs, choose_gamma, predict
from draftheads.eval.records import Journal
from draftheads.eval.subject import Checkpoint, Prompt, has_length, make_plan, parts
from draftheads.eval.work import SPARE, Evaluation
from draftheads.inference import measure
from draftheads.inference.decode import decode
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.measure import CostSamples
from draftheads.inference.requests import Limits, Request
from draftheads.inference.shapes import Shape
from draftheads.inference.target import Target
from draftheads.recipes.schema import EvalSection, RecipeError

# Draft lengths that are tried. Copies are free to draft and often right to the end, so theirs go further.
COPIES, STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (1, 2, 3, 4, 5, 6, 7, 8)
LENGTHS = {"ngram": COPIES, "suffix": COPIES, "head": STEPS, "draft_model": STEPS, "mtp": STEPS}
# Drafts of the filler (verify width − 1) and of the drafters in the micro-benchmark.
FILLERS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
TIMED = {"ngram": (1, 8), "suffix": (1, 8), "head": (1, 4, 8), "draft_model": (1, 4), "mtp": (1, 4)}
# Prompts and tokens that are spent on estimating acceptance.
CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 14, 32
# Training prompts on which the head is decoded, to compare with what training measured.
TRAINING_PROMPTS = 14
# Rounds of one pass of the micro-benchmark, and how often all passes are gone through.
ROUNDS, REPEATS = 8, 2


def choose_costs(work: Evaluation, journal: Journal) -> dict[str, Any]:
    """{"costs", "gamma", "gamma_chosen", "predicted", "table"}, measured once per evaluation."""
    done = journal.of("costs")
    if done:
        return done[0]
    drafting = {part.name: part for drafter in work.drafters.values() for part in parts(drafter) if part.name != "none"}
    found: dict[str, Any] = {"costs": None, "gamma": {}, "gamma_chosen": "given", "predicted": {}, "table": {}}
    if not drafting:
        journal.append("costs", found)
        return found
    if not work.section.costs:
        found["gamma"] = {n: {s: given_length(work.section, s) for s in work.sources(n)} for n in work.drafters if n != "none"}
        journal.append("costs", found)
        return found
    work.warm_up()
    costs = _measure_costs(work, drafting)
    found["costs"] = costs.to_json()
    rounds = _calibrate(work)
    if work.section.gamma == "auto":
        found["gamma_chosen"] = "measured"
    for name in work.drafters:
        if name == "none":
            continue
        sources = work.sources(name)
        if work.section.gamma == "auto" and sources:
            choice = choose_gamma(rounds[name], costs, {s: LENGTHS[s] for s in sources})
            found["gamma"][name], found["predicted"][name] = choice.gamma, choice.speedup
            found["table"][name] = choice.table if len(sources) == 1 else sorted(choice.table, key=lambda r: -r["speedup"])[:8]
        else:
            found["gamma"][name] = {s: given_length(work.section, s) for s in sources}
            found["predicted"][name] = predict(rounds[name], costs, found["gamma"][name])[0]
    journal.append("costs", found)
    return found


def given_length(section: EvalSection, source: str) -> int:
    """The draft length that the recipe names for a source."""
    if source in ("ngram", "suffix"):
        return section.ngram.gamma if source == "ngram" else section.suffix.gamma
    assert section.gamma != "auto"
    return section.gamma


def _measure_costs(work: Evaluation, drafting: dict[str, Drafter]) -> Costs:
    timed = {name: (drafter, TIMED[name]) for name, drafter in drafting.items() if has_length(name, work.tree)}
    passes = REPEATS * (1 + len(FILLERS) + sum(len(gammas) for _, gammas in timed.values()) + len(drafting) - len(timed))
    work.progress.stage("measuring what drafting and verifying cost", passes, "passes")
    for drafter in drafting.values():
        make_plan(drafter, {})  # copies as long as the micro-benchmark's plans
    block = work.requests(middling(work.calibration, work.section.batch_size))
    samples = measure.sample_costs(
        work.target, timed, block, fillers=FILLERS, rounds=ROUNDS, repeats=REPEATS, on_pass=lambda: work.progress.advance(1)
    )
    for name in [n for n in drafting if n not in timed] * REPEATS:
        assert work.tree is not None
        _sample_tree(samples, work.target, name, drafting[name], block, work.tree)
        work.progress.advance(1)
    work.progress.finish()
    return Costs.from_json(measure.fit_costs(samples))


def middling(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Prompts of middling length, to time rounds on: what a step costs grows with the text."""
    by_length = sorted(prompts, key=lambda p: len(p.ids))
    middle = len(by_length) // 2
    return (by_length[middle:] + by_length[:middle])[:count]


def _sample_tree(samples: CostSamples, target: Target, name: str, drafter: Drafter, block: list[Request], tree: Shape) -> None:
    """Some rounds with the tree, the first one dropped. All that drafting costs goes to one draft length, so that none of it counts per token."""
    room = (ROUNDS + 1) * (tree.depth + 1)
    limits = Limits(room + 1, max(len(r.prompt_ids) for r in block) + room + SPARE, ignore_eos=True)
    seen = 0
    for r in decode(target, drafter, block, limits=limits, batch_size=len(block), plan=Plan(tree=tree), timed=True):
        seen += bool(r.width)
        if seen > 1 and r.width:
            samples.rest_s.setdefault(name, []).append(r.t_total - r.t_draft - r.t_verify)
            samples.draft_s.setdefault(name, {}).setdefault(tree.nodes, []).append(r.t_draft)
            if r.width == tree.nodes + 1:
                samples.verify_s.setdefault(r.width, []).append(r.t_verify)
        if seen > ROUNDS:
            break


def _calibrate(work: Evaluation) -> dict[str, list[Any]]:
    """Rounds of every drafter with its longest drafts on the calibration prompts: what choose_gamma cuts down."""
    tokens = min(CALIBRATION_TOKENS, work.section.max_new_tokens)
    names = [n for n in work.drafters if n != "none"]
    work.progress.stage("estimating acceptance for the choice of γ", len(names) * len(work.calibration) * tokens)
    found = {}
    for name in names:
        work.forget()
        rows = work.decode_untimed(name, work.calibration, {source: max(LENGTHS[source]) for source in work.sources(name)}, work.limits(tokens))
        found[name] = [r for c in rows.completions for r in c.rounds]
    work.progress.finish()
    return found


def calibration_prompts(
    target: Target, others: list[Conversation], checkpoint: Checkpoint, prompts: list[Prompt], room: int, count: int | None = None
) -> list[Prompt]:
    """Held-out prompts that are not evaluated; else training prompts; else (nothing else there) the evaluated ones."""
    count = count or CALIBRATION_PROMPTS
    evaluated = {p.id for p in prompts}
    wanted = others or [c for c in _training_conversations(checkpoint, 8 * count) if c.id not in evaluated]
    return _rendered(target, wanted, count, room) or prompts[:count]


def training_prompts(work: Evaluation) -> list[Prompt]:
    """Some of the prompts that the head was trained on; [] if that is not known."""
    if work.checkpoint.meta.data_hash is None:
        return []
    wanted = _training_conversations(work.checkpoint, TRAINING_PROMPTS)
    return _rendered(work.target, wanted, TRAINING_PROMPTS, work.section.max_new_tokens + SPARE)


def _training_conversations(checkpoint: Checkpoint, limit: int) -> list[Conversation]:
    """A smaller limit selects a prefix of what a larger one does, so these are prompts of the training set."""
    try:
        return recipe_prompts(checkpoint.recipe, limit)[0]
    except RecipeError:  # they need not be here where the head is evaluated
        return []


def _rendered(target: Target, wanted: list[Conversation], count: int, room: int) -> list[Prompt]:
    """The first `count` that can be rendered and fit."""
    found: list[Prompt] = []
    for c in wanted:
        if len(found) == count:
            break
        try:
            found += subject.render_prompts(target, [c], room)
        except RecipeError:
            continue  # too long, or of turns that the template refuses: others will do
    return found
