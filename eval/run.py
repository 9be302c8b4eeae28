"""The evaluation, from a checkpoint to a report.

    open ─► prompts ─► target, drafters ─► costs and γ (calibration prompts) ─► blocks: every contender, in rotating order ─► untimed runs at
    eval.tau_gamma ─► summary ─► report.json, report.md, report.html

Fairness: all drafters decode the same prompts on the same path in one process, interleaved prompt by prompt; `none` is that path without drafts;
transformers' generate runs on every n-th block, in the same rotation, from a second copy of the target, unmodified but for a head's adapter. Prefill
is outside every figure. γ is chosen on prompts that are not evaluated.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftheads.eval import subject
from draftheads.eval.blocks import difference, plan_blocks, run_blocks
from draftheads.eval.calibrate import calibration_prompts, choose_costs, training_prompts
from draftheads.eval.cost_model import Costs
from draftheads.eval.drift import measure_drift
from draftheads.eval.progress import Progress
from draftheads.eval.provenance import provenance_of, settings_of
from draftheads.eval.records import Block, Journal, timed_from_json, timed_to_json
from draftheads.eval.subject import Checkpoint
from draftheads.eval.summary import Evidence, build_report
from draftheads.eval.trace import traces
from draftheads.eval.work import SPARE, Evaluation
from draftheads.inference import metrics
from draftheads.inference.processors import wanted as wanted_history
from draftheads.inference.requests import Completion
from draftheads.inference.target import load_target
from draftheads.recipes.files import locked, write_json, write_text


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
    with locked(folder / ".eval.lock", f"evaluating into {folder}", "give this evaluation another folder: --out DIR"):
        with Progress(quiet=quiet) as progress:
            progress.stage(f"loading {checkpoint.recipe.target.name} and {checkpoint.name}", 1, "models")
            target = load_target(checkpoint.recipe.target, checkpoint.adapter, device=device)
            room = section.max_new_tokens + SPARE
            prompts = subject.render_prompts(target, chosen, room)
            calibration = calibration_prompts(target, others, checkpoint, prompts, room)
            drafters = subject.load_drafters(checkpoint, target, section.drafters)
            progress.finish()
            work = Evaluation(checkpoint, section, target, drafters, prompts, calibration, progress)
            settings = settings_of(work)
            journal = Journal(folder / "records.jsonl", settings, fresh=fresh)
            evidence = _gather(work, journal)
            trace = traces(target.tokenizer, prompts, evidence.blocks, evidence.under_test)
        provenance = provenance_of(work, evidence.rounds_ran, time.monotonic() - began)
        report = build_report(evidence, settings={**settings, "dropped_prompts": dropped}, provenance=provenance, trace=trace)
        _write(report, folder)
    return Outcome(report, folder)


def _write(report: dict[str, Any], folder: Path) -> None:
    from draftheads.eval.report.html import render_html
    from draftheads.eval.report.markdown import render_markdown

    write_text(folder / "report.md", render_markdown(report))
    write_text(folder / "report.html", render_html(report))
    write_json(folder / "report.json", report)  # last: whoever waits for it finds all three


def _gather(work: Evaluation, journal: Journal) -> Evidence:
    """All measurements, those that an earlier, killed run already made included."""
    section = work.section
    blocks = {b.index: b for b in map(Block.from_json, journal.of("block"))}
    untimed = {e["drafter"]: timed_from_json(e, e["ids"]).completions for e in journal.of("untimed")}
    differences = {e["drafter"]: e.get("differences", []) for e in journal.of("untimed")}
    if blocks:
        work.progress.note(f"resuming: {len(blocks)} of {len(plan_blocks(work))} blocks are done")
    costs = choose_costs(work, journal)
    work.gamma = costs["gamma"]
    run_blocks(work, journal, blocks)
    _run_untimed(work, journal, blocks, untimed, differences)
    s = work.sampling
    lossy = None if s.lossy is None else {"rule": s.lossy, "epsilon": s.typical_epsilon, "alpha": s.typical_alpha}
    drafting = {"tree": subject.tree_text(work.tree), "grown_by": work.grown_by, "copy_first": section.copy_first, "draft_model": section.draft_model}
    return Evidence(
        [blocks[i] for i in sorted(blocks)], list(work.drafters), work.gamma, section.tau_gamma,
        {"temperature": section.temperature, "batch_size": section.batch_size, "device": work.target.device.type, "dtype": work.dtype},
        untimed, differences, Costs.from_json(costs["costs"]) if costs["costs"] else None, costs["gamma_chosen"], costs["predicted"], costs["table"],
        _expected(work, journal), section.bootstrap, section.seed, lossy, drafting, _rounds_ran(work, journal),
        measure_drift(work, journal, list(blocks.values())),
    )


def _rounds_ran(work: Evaluation, journal: Journal) -> str:
    """How the rounds were executed: as CUDA graphs or eagerly, and why. Of the process that measured, where this one only renders."""
    if work.target.device.type != "cuda":
        return f"eager ({work.target.device.type})"
    if work.decoded:
        ran = work.target.graphs.status
        if wanted_history(work.sampling):
            ran = f"verifying: eager (repetition penalty, no-repeat n-grams and minimum length look at what was written); drafting: {ran}"
        if "mtp" in work.drafters:
            ran += "; mtp drafts eagerly"
        journal.append("rounds", {"ran": ran})
        return ran
    return next((str(e["ran"]) for e in reversed(journal.of("rounds"))), "unknown")


def _run_untimed(work: Evaluation, journal: Journal, blocks: dict[int, Block], untimed: dict[str, list[Completion]],
                 differences: dict[str, list[dict[str, Any]]]) -> None:
    """The head, and what contains it, with drafts of eval.tau_gamma tokens, unless the timed runs used just these or a tree; with sampling
    every drafter, for the certificate. Greedy outputs are compared with none's of the timed runs."""
    sampled = work.sampling.temperature > 0
    wanted: dict[str, dict[str, int]] = {}
    for name in work.drafters:
        gamma = {s: work.section.tau_gamma if s == "head" else work.gamma[name][s] for s in work.gamma.get(name, {})}
        if name not in untimed and (sampled or gamma != work.gamma.get(name, {})):
            wanted[name] = gamma
    if not wanted:
        return
    expected = {c.request.id: c.tokens for b in blocks.values() if "none" in b.runs for c in b.runs["none"].completions}
    work.progress.stage(f"acceptance at γ = {work.section.tau_gamma}", len(wanted) * len(work.prompts) * work.section.max_new_tokens)
    for name, gamma in wanted.items():
        work.forget()  # or a suffix drafter would recite what the timed runs wrote
        timed = work.decode_untimed(name, work.prompts, gamma, work.limits(), certificate=sampled)
        untimed[name], differences[name] = timed.completions, []
        if not sampled:
            pair = f"none/{name} (γ = {work.section.tau_gamma})"
            differences[name] = [difference(work, p, pair, expected[p.id], c.tokens) for p, c in zip(work.prompts, timed.completions, strict=True)
                                 if p.id in expected]
        journal.append("untimed", {"drafter": name, "gamma": gamma, "ids": [p.id for p in work.prompts], "differences": differences[name],
                                   **timed_to_json(timed)})
    work.progress.finish()


def _expected(work: Evaluation, journal: Journal) -> dict[str, Any] | None:
    """The τ that training measured teacher-forced (joint prefix over its unroll steps), and τ decoded on some of the training prompts with
    drafts of the same length: if these two agree, a lower τ on held-out prompts is the head's learning, not a fault in the decoding."""
    found = work.checkpoint.meta.metrics
    tau, accuracy = found.get("tau"), found.get("accuracy")
    if not isinstance(tau, int | float) or not isinstance(accuracy, list) or not accuracy or work.section.temperature > 0:
        return None  # training's hits are argmaxes: nothing to compare with when sampling
    source = "teacher-forced accuracy on the last training batches"
    expected = {"tau": float(tau), "gamma": len(accuracy), "source": source, "accuracy_per_step": accuracy, "training_prompts_tau": None}
    done = journal.of("training")
    if done:
        return {**expected, "training_prompts_tau": done[0]["tau"]}
    prompts = training_prompts(work)
    if "head" in work.drafters and prompts:
        work.progress.stage("the head on training prompts, for comparison", len(prompts) * work.section.max_new_tokens)
        rows = work.decode_untimed("head", prompts, {"head": len(accuracy)}, work.limits(prompts=prompts)).completions
        expected["training_prompts_tau"] = metrics.tau(metrics.all_rounds(rows))
        journal.append("training", {"tau": expected["training_prompts_tau"], "ids": [p.id for p in prompts]})
        work.progress.finish()
    return expected


def silence() -> None:
    """transformers' advice and warnings do not belong between the lines of a progress bar."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")
