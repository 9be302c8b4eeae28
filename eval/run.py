"""The evaluation, from a checkpoint to a report.

    open ─► prompts ─► target, drafters ─► costs and γ (calibration prompts) ─► blocks: every contender, in rotating order ─► untimed runs at
    eval.tau_gamma ─► summary ─► report.json, report.md, report.html

Fairness: all drafters decode the same prompts on the same path in one process, interleaved prompt by prompt; `none` is that path without
drafts; transformers' generate runs on every n-th block, in the same rotation, from a second, unmodified copy of the target. Prefill is
outside every figure. γ is chosen on prompts that are not evaluated.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftheads.data.conversations import Conversation, read_prompts
from draftheads.eval import subject
from draftheads.eval.cost_model import Costs, choose_gamma, predict
from draftheads.eval.lossless import IDENTICAL, Divergence, compare, target_logits
from draftheads.eval.progress import Progress
from draftheads.eval.records import TRANSFORMERS, Block, Journal, timed_from_json, timed_to_json
from draftheads.eval.subject import Checkpoint, Prompt, set_gamma
from draftheads.eval.summary import Evidence, build_report
from draftheads.inference import measure, metrics
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.measure import Timed
from draftheads.inference.requests import Completion, Limits, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import EvalSection, RecipeError

# Longest draft that the calibration tries, prompts and tokens it spends, and how many rows the untimed runs decode together.
LONGEST, CALIBRATION_PROMPTS, CALIBRATION_TOKENS, UNTIMED_BATCH = 8, 14, 48, 8
# Slots behind prompt and answer that a round may write beyond the end.
SPARE = 16


@dataclass
class Evaluation:
    """One evaluation in progress."""

    checkpoint: Checkpoint
    section: EvalSection
    target: Target
    drafters: dict[str, Drafter]
    prompts: list[Prompt]
    calibration: list[Prompt]
    progress: Progress
    gamma: dict[str, dict[str, int]] = field(default_factory=dict)
    plain: Any = None  # transformers' own model, while it is needed

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.section.temperature, self.section.top_k, self.section.top_p)

    def limits(self, max_new_tokens: int | None = None) -> Limits:
        new = max_new_tokens or self.section.max_new_tokens
        longest = max(len(p.ids) for p in [*self.prompts, *self.calibration])
        return Limits(max_new_tokens=new, max_len=min(longest + new + SPARE, self.target.geometry.max_positions))


@dataclass
class Outcome:
    report: dict[str, Any]
    folder: Path

    @property
    def html(self) -> Path:
        return self.folder / "report.html"


def evaluate(
    checkpoint: Checkpoint, *, out: Path | None = None, threads: int | None = None, device: str | None = None, fresh: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Run, or go on with, the evaluation that the checkpoint's recipe describes. Writes the report into `out` (default: report/ of the run).

    Raises RecipeError for bad input before anything is decoded. A finished evaluation with the same settings is only rendered again.
    """
    section = checkpoint.recipe.eval
    folder = out or (checkpoint.run or checkpoint.folder) / "report"
    began = time.monotonic()
    if threads is not None:
        torch.set_num_threads(threads)
    chosen, others, dropped = subject.read_conversations(section)
    with Progress(quiet=quiet) as progress:
        progress.stage(f"loading {checkpoint.recipe.target.name} and {checkpoint.name}", 1, "models")
        target = subject.load_target(checkpoint, device=device)
        room = section.max_new_tokens + SPARE
        prompts = subject.render_prompts(target, chosen, room)
        calibration = _calibration_prompts(target, others, checkpoint, prompts, room)
        drafters = subject.load_drafters(checkpoint, target, section.drafters, section.ngram)
        progress.finish()
        work = Evaluation(checkpoint, section, target, drafters, prompts, calibration, progress)
        settings = _settings(work)
        journal = Journal(folder / "records.jsonl", settings, fresh=fresh)
        evidence = _gather(work, journal)
        trace = _traces(work, evidence)
    provenance = _provenance(work, time.monotonic() - began)
    report = build_report(evidence, settings={**settings, "dropped_prompts": dropped}, provenance=provenance, trace=trace)
    _write(report, folder)
    return Outcome(report, folder)


def _write(report: dict[str, Any], folder: Path) -> None:
    from draftheads.eval.report.html import render_html
    from draftheads.eval.report.markdown import render_markdown
    from draftheads.recipes.files import write_json, write_text

    write_text(folder / "report.md", render_markdown(report))
    write_text(folder / "report.html", render_html(report))
    write_json(folder / "report.json", report)  # last: whoever waits for it finds all three


def _gather(work: Evaluation, journal: Journal) -> Evidence:
    """All measurements, those that an earlier, killed run already made included."""
    section = work.section
    blocks = {b.index: b for b in map(Block.from_json, journal.of("block"))}
    untimed = {e["drafter"]: timed_from_json(e, e["ids"]).completions for e in journal.of("untimed")}
    if blocks:
        work.progress.note(f"resuming: {len(blocks)} of {len(_plan_blocks(work))} blocks are done")
    costs = _costs(work, journal)
    work.gamma = costs["gamma"]
    _run_blocks(work, journal, blocks)
    _run_untimed(work, journal, untimed)
    return Evidence(
        [blocks[i] for i in sorted(blocks)], list(work.drafters), work.gamma, section.tau_gamma,
        {"temperature": section.temperature, "batch_size": section.batch_size, "device": work.target.device.type,
         "dtype": str(work.target.dtype).removeprefix("torch.")},
        untimed, Costs.from_json(costs["costs"]) if costs["costs"] else None, costs["gamma_chosen"], costs["predicted"], costs["table"],
        _expected(work.checkpoint, section), section.bootstrap, section.seed,
    )


# ---- costs, and the draft length they call for


def _costs(work: Evaluation, journal: Journal) -> dict[str, Any]:
    """{"costs", "gamma", "gamma_chosen", "predicted", "table"}, measured once per evaluation."""
    done = journal.of("costs")
    if done:
        return done[0]
    drafting = {n: d for n, d in work.drafters.items() if n in ("ngram", "head")}
    if "composite" in work.drafters:
        both = work.drafters["composite"]
        assert isinstance(both, Composite)
        drafting = {"ngram": both.first, "head": both.second} | drafting
    found: dict[str, Any] = {"costs": None, "gamma": {}, "gamma_chosen": "given", "predicted": {}, "table": {}}
    if not drafting:
        journal.append("costs", found)
        return found
    _warm_up(work)
    costs = _measure_costs(work, drafting)
    found["costs"] = costs.to_json()
    rounds = _calibrate(work)
    for name in work.drafters:
        sources = [s for s in ("ngram", "head") if s == name or name == "composite"]
        if not sources:
            continue
        if work.section.gamma == "auto":
            choice = choose_gamma(rounds[name], costs, sources, longest=LONGEST)
            found["gamma"][name], found["gamma_chosen"], found["predicted"][name] = choice.gamma, "measured", choice.speedup
            found["table"][name] = choice.table if len(sources) == 1 else sorted(choice.table, key=lambda r: -r["speedup"])[:8]
        else:
            found["gamma"][name] = {s: work.section.gamma if s == "head" else work.section.ngram.gamma for s in sources}
            found["predicted"][name] = predict(rounds[name], costs, found["gamma"][name])[0]
    journal.append("costs", found)
    return found


def _measure_costs(work: Evaluation, drafting: dict[str, Drafter]) -> Costs:
    passes = 2 * (1 + LONGEST + 3 * len(drafting))
    work.progress.stage("measuring what drafting and verifying cost", passes, "passes")
    for drafter in drafting.values():
        set_gamma(drafter, {})
    # The longest prompts: what a step costs grows with the text, and short ones would flatter the target.
    by_length = sorted(work.calibration, key=lambda p: len(p.ids))
    middle = len(by_length) // 2
    block = [subject.request(p, work.section.seed) for p in (by_length[middle:] + by_length[:middle])][: work.section.batch_size]
    samples = measure.sample_costs(work.target, drafting, block, longest=LONGEST, on_pass=lambda: work.progress.advance(1))
    work.progress.finish()
    return Costs.from_json(measure.fit_costs(samples, LONGEST))


def _calibrate(work: Evaluation) -> dict[str, list[Any]]:
    """Rounds of every drafter at γ = LONGEST on the calibration prompts: what choose_gamma cuts down."""
    tokens = min(CALIBRATION_TOKENS, work.section.max_new_tokens)
    names = [n for n in work.drafters if n != "none"]
    work.progress.stage("estimating acceptance for the choice of γ", len(names) * len(work.calibration) * tokens)
    found = {}
    for name in names:
        gamma = set_gamma(work.drafters[name], {"ngram": LONGEST, "head": LONGEST})
        rows = _decode_untimed(work, name, work.calibration, Plan(gamma=gamma), work.limits(tokens))
        found[name] = [r for c in rows.completions for r in c.rounds]
    work.progress.finish()
    return found


def _decode_untimed(work: Evaluation, name: str, prompts: Sequence[Prompt], plan: Plan, limits: Limits, *, certificate: bool = False) -> Timed:
    requests = [subject.request(p, work.section.seed) for p in prompts]
    return measure.timed_decode(
        work.target, work.drafters[name], requests, work.sampling, limits, plan=plan, batch_size=min(UNTIMED_BATCH, len(requests)),
        certificate=certificate, on_round=lambda r: work.progress.advance(sum(map(len, r.new_tokens.values()))),
    )


def _warm_up(work: Evaluation) -> None:
    """Caches, thread pools and lazily built kernels: nothing timed may be the first of its kind."""
    first = [subject.request(p, 0) for p in work.calibration[: work.section.batch_size]]
    for name, drafter in work.drafters.items():
        gamma = set_gamma(drafter, work.gamma.get(name, {"ngram": 4, "head": 4}))
        measure.timed_decode(work.target, drafter, first, work.sampling, work.limits(8), plan=Plan(gamma=gamma), batch_size=len(first))
    if work.plain is not None:
        _generate(work, first, work.limits(8))


# ---- the timed runs


def _plan_blocks(work: Evaluation) -> list[list[Prompt]]:
    """Blocks of `batch_size` prompts of one category; categories take turns, so that drift meets all of them alike."""
    by_category: dict[str, list[Prompt]] = {}
    for p in work.prompts:
        by_category.setdefault(p.category, []).append(p)
    size = work.section.batch_size
    split = [[prompts[i : i + size] for i in range(0, len(prompts), size)] for prompts in by_category.values()]
    return [blocks[i] for i in range(max(map(len, split))) for blocks in split if i < len(blocks)]


def _also_transformers(count: int, fraction: float) -> set[int]:
    """Indices of the blocks that transformers runs too: round(count · fraction), evenly spread."""
    chosen = round(count * fraction) if fraction >= 1 or count * fraction >= 1 else int(fraction > 0)
    return {int(i * count / chosen) for i in range(chosen)}


def _run_blocks(work: Evaluation, journal: Journal, blocks: dict[int, Block]) -> None:
    plan = _plan_blocks(work)
    shared = _also_transformers(len(plan), work.section.transformers_fraction)
    missing = [i for i in range(len(plan)) if i not in blocks]
    if not missing:
        return
    if shared & set(missing):
        work.progress.stage("loading the target once more for transformers' generate", 1, "models")
        work.plain = measure.plain_model(work.target, trust_remote_code=work.checkpoint.recipe.target.trust_remote_code)
        work.progress.finish()
    _warm_up(work)
    names = list(work.drafters)
    share = work.section.max_new_tokens
    work.progress.stage("timed runs, all drafters interleaved", sum(len(plan[i]) * share * (len(names) + (i in shared)) for i in missing))
    with _no_collection():
        for i in missing:
            block = _run_block(work, i, plan[i], [*names, *([TRANSFORMERS] if i in shared else [])])
            blocks[i] = block
            journal.append("block", block.to_json())
    work.progress.finish()
    work.plain = None


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection inside a run would be charged to whoever is running (with transformers loaded it takes a second). What lives
    now is frozen, and the little that piles up is collected between the runs."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _run_block(work: Evaluation, index: int, prompts: list[Prompt], contenders: list[str]) -> Block:
    block = Block(index, prompts[0].category, [p.id for p in prompts], [len(p.ids) for p in prompts])
    requests = [subject.request(p, work.section.seed) for p in prompts]
    for name in measure.rotation(contenders, index):
        written = 0

        def count(r: Any) -> None:
            nonlocal written
            new = sum(map(len, r.new_tokens.values()))
            written += new
            work.progress.advance(new)

        gc.collect()
        if name == TRANSFORMERS:
            timed = _generate(work, requests, work.limits())
        else:
            drafter = work.drafters[name]
            plan = Plan(gamma=set_gamma(drafter, work.gamma.get(name, {})))
            timed = measure.timed_decode(work.target, drafter, requests, work.sampling, work.limits(), plan=plan, batch_size=len(requests),
                                         on_round=count)
        failed = [c for c in timed.completions if c.finish_reason == "error"]
        if failed:
            raise RecipeError(f"prompt {failed[0].request.id} cannot be decoded: {failed[0].error}")
        work.progress.advance(len(prompts) * work.section.max_new_tokens - written)
        block.runs[name] = timed
    if work.sampling.temperature == 0:
        block.differences = _differences(work, block, prompts)
    return block


def _generate(work: Evaluation, requests: Sequence[Any], limits: Limits) -> Timed:
    tokenizer = work.target.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(work.target.eos_ids, default=0)
    return measure.timed_generate(work.plain, requests, work.sampling, limits, eos_ids=sorted(work.target.eos_ids), pad_id=pad)


def _differences(work: Evaluation, block: Block, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Greedy: none against every drafter, and transformers (where it ran) against all of ours."""
    pairs = [(a, b) for a in (TRANSFORMERS, "none") for b in work.drafters if a in block.runs and a != b]
    dtype = str(work.target.dtype).removeprefix("torch.")
    tokenizer = work.target.tokenizer
    found = []
    for row, prompt in enumerate(prompts):
        for a, b in pairs:
            expected, got = (block.runs[n].completions[row].tokens for n in (a, b))
            result: Divergence = compare(expected, got, target_logits(work.target, prompt.ids), dtype)
            item = {"id": prompt.id, "category": prompt.category, "pair": f"{a}/{b}", **result.to_json()}
            if result.verdict != IDENTICAL:
                item |= {f"{key}_text": None if (t := item[key]) is None else tokenizer.decode([t]) for key in ("expected", "found")}
            found.append(item)
    return found


# ---- the untimed runs


def _run_untimed(work: Evaluation, journal: Journal, untimed: dict[str, list[Completion]]) -> None:
    """The head, and what contains it, with drafts of eval.tau_gamma tokens, unless the timed runs used just these; with sampling every
    drafter, for the certificate."""
    sampled = work.sampling.temperature > 0
    wanted: dict[str, dict[str, int]] = {}
    for name in work.drafters:
        gamma = {s: work.section.tau_gamma if s == "head" else work.gamma[name][s] for s in work.gamma.get(name, {})}
        if name not in untimed and (sampled or gamma != work.gamma.get(name, {})):
            wanted[name] = gamma
    if not wanted:
        return
    work.progress.stage(f"acceptance at γ = {work.section.tau_gamma}", len(wanted) * len(work.prompts) * work.section.max_new_tokens)
    for name, gamma in wanted.items():
        plan = Plan(gamma=set_gamma(work.drafters[name], gamma))
        timed = _decode_untimed(work, name, work.prompts, plan, work.limits(), certificate=sampled)
        untimed[name] = timed.completions
        journal.append("untimed", {"drafter": name, "gamma": gamma, "ids": [p.id for p in work.prompts], **timed_to_json(timed)})
    work.progress.finish()


# ---- what the report says beside figures


def _calibration_prompts(
    target: Target, others: list[Conversation], checkpoint: Checkpoint, prompts: list[Prompt], room: int
) -> list[Prompt]:
    """Held-out prompts that are not evaluated; else training prompts; else (nothing else there) the evaluated ones."""
    wanted = others
    if not wanted:
        try:
            evaluated = {p.id for p in prompts}
            data = checkpoint.recipe.data
            wanted = [c for c in read_prompts(data.prompts, limit=8 * CALIBRATION_PROMPTS, seed=data.seed)[0] if c.id not in evaluated]
        except RecipeError:
            wanted = []
    found = []
    for c in wanted:
        try:
            found += subject.render_prompts(target, [c], room)
        except RecipeError:
            continue  # too long, or not renderable: others will do
        if len(found) == CALIBRATION_PROMPTS:
            break
    return found or prompts[:CALIBRATION_PROMPTS]


def _expected(checkpoint: Checkpoint, section: EvalSection) -> dict[str, Any] | None:
    """τ that the training's teacher-forced measurements promise for a chain of tau_gamma drafts, or of as many as were unrolled."""
    found = checkpoint.meta.metrics
    positions = found.get("acceptance_per_position") or found.get("joint_per_step")
    if isinstance(positions, list) and positions:
        gamma = min(section.tau_gamma, len(positions))
        tau = 1 + sum(positions[:gamma])
        return {"tau": tau, "gamma": gamma, "source": "teacher-forced accuracy in training", "acceptance_per_position": positions}
    return None


def _traces(work: Evaluation, evidence: Evidence) -> list[dict[str, Any]]:
    """One answer per category, round by round."""
    prompts = {p.id: p for p in work.prompts}
    name = evidence.under_test
    found: dict[str, dict[str, Any]] = {}
    for block in evidence.blocks:
        row = block.runs[name].completions[0]
        if block.category in found or not row.rounds:
            continue
        pieces = token_texts(work.target.tokenizer, row.tokens)
        rounds: list[dict[str, Any]] = [{"source": "none", "drafted": 0, "accepted": 0, "pieces": pieces[:1]}]
        at = 1
        for r in row.rounds:
            rounds.append({"source": r.source, "drafted": r.drafted, "accepted": min(r.accepted, r.emitted), "pieces": pieces[at : at + r.emitted]})
            at += r.emitted
        prompt = prompts[row.request.id]
        found[block.category] = {
            "id": prompt.id, "category": prompt.category, "prompt": prompt.text, "drafter": name, "tau": metrics.tau(row.rounds),
            "finish_reason": row.finish_reason, "rounds": rounds,
        }
    return list(found.values())


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Text of each token in its context; a token that ends inside a character contributes to the one that completes it."""
    pieces, shown = [], ""
    for i in range(len(tokens)):
        text = tokenizer.decode(list(tokens[: i + 1]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith("�") and i + 1 < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        shown = text
    return pieces


def _settings(work: Evaluation) -> dict[str, Any]:
    """What must be equal for a journal to be continued."""
    return {
        "checkpoint": work.checkpoint.hashes(), "eval": work.section.model_dump(mode="json"), "target": work.target.name,
        "revision": work.target.revision, "template": work.target.template_hash, "device": work.target.device.type,
        "dtype": str(work.target.dtype).removeprefix("torch."), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "prompts": [p.id for p in work.prompts],
    }


def _provenance(work: Evaluation, seconds: float) -> dict[str, Any]:
    meta, target = work.checkpoint.meta, work.target
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "versions": _versions(), "hardware": _hardware(target.device),
        "threads": torch.get_num_threads(),
        "target": {"name": target.name, "revision": target.revision, "template_hash": target.template_hash, "packed": target.packed,
                   "attention of the baseline": "draftheads, folded groups", "attention of transformers": "its default"},
        "checkpoint": {"name": work.checkpoint.name, **work.checkpoint.hashes()},
        "recipe_hash": meta.recipe_hash, "data_hash": meta.data_hash, "seconds": round(seconds, 1),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("draftheads", "torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu_name(), "cores": os.cpu_count()}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def silence() -> None:
    """transformers' advice and warnings do not belong between the lines of a progress bar."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")
