"""How fast the decoder is, against transformers and against what its own costs allow.

    (a) our autoregressive path against transformers' generate
    (b) rounds against what their parts cost: verifying, drafting, the rest, measured beforehand on other prompts
    (c) n-gram drafts against transformers' prompt lookup, on prompts whose answers copy
    (d) a draft model, cut from the target, against transformers' assisted generation with the same one
    (e) batches: tokens/s, speed-up, and from which batch on drafting no longer pays
    (f) on a GPU, or with --geometry: the share of the memory's roofline, eager against graphed steps, copies to the host

Everything is decode only, greedy, paired and interleaved, on the held-out prompts of the evaluation; what is measured beforehand (costs,
draft lengths) comes from training prompts. Intervals are 95 %, by bootstrap over prompts. Other work on the machine spoils the figures: the
load found at the start is reported. Nothing is downloaded, unless --target names a Hub model that is not here.

    python benchmarks/decode.py --quick                                   a first look
    python benchmarks/decode.py --threads 2 --ckpt runs/NAME --json       everything, with a trained head
    python benchmarks/decode.py --geometry llama-3.1-8b                   a GPU and an 8B target, without its weights
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

# Markdown for --help: what is indented above is a line of its own.
HELP = re.sub(r"\n {4}", "\n\n", __doc__ or "")
KEYS = (
    "ar_vs_transformers", "efficiency", "overhead", "verify_cost", "draft_cost", "ngram_vs_transformers", "draft_model_vs_transformers", "by_batch",
)
SECTIONS = "abcdef"
# Draft lengths of the contests (b) and (e).
GAMMA = {"ngram": 8, "head": 3, "draft_model": 2}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    sections: str
    target: str | None
    ckpt: Path | None
    quick: bool
    device: str | None
    batches: list[int]
    gamma: int
    draft_layers: int
    tune_minutes: float
    geometry: str | None


@app.command(help=HELP)
def run(
    target: Annotated[str | None, typer.Option(help="Named target, Hub id or folder. Default: the checkpoint's, else smollm2-135m.")] = None,
    ckpt: Annotated[Path | None, typer.Option(help="Checkpoint or run folder: its head takes part in (b), (e) and (f).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and tokens: 3 minutes instead of 15 on two CPU cores.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table. Every figure: value, 95 % interval, n.")] = False,
    only: Annotated[str, typer.Option(help="Sections to run, e.g. `a,c`. Default: a to e, on a GPU f too.")] = "",
    device: Annotated[str | None, typer.Option(help="`cpu`, `cuda`, `cuda:1`. Default: a GPU if there is one.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's own choice.")] = 0,
    batches: Annotated[str, typer.Option(help="Batch sizes of (e).")] = "1,2,4,8",
    gamma: Annotated[int, typer.Option(min=1, help="Draft length of both sides in (c).")] = 10,
    draft_layers: Annotated[int, typer.Option(min=1, help="(d): the draft model is the target's first so many layers.")] = 2,
    tune_minutes: Annotated[float, typer.Option(min=0, max=20, help="(d): tune the draft model on the target's answers for so long.")] = 0.0,
    geometry: Annotated[str | None, typer.Option(help="Section (f) alone, on random weights: `llama-3.1-8b` (16 GB on a GPU) or `tiny`.")] = None,
) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # its assisted generation warns of its own arguments
    if threads:
        torch.set_num_threads(threads)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    sections = _sections(only, geometry, device)
    options = Options(sections, target, ckpt, quick, device, _batches(batches), gamma, draft_layers, tune_minutes, geometry)
    report, bench = measure(options)
    full: dict[str, Any] = {**dict.fromkeys(KEYS), **report, "identical": bench.identical, "provenance": _provenance(bench, quick, load)}
    print(json.dumps(full, indent=2) if as_json else table(full))


def measure(options: Options) -> tuple[dict[str, Any], Any]:
    """-> the report's sections, and the bench they ran on."""
    import contests
    import roofline

    from draftheads.eval.progress import Progress
    from draftheads.eval.subject import load_drafters, open_checkpoint
    from draftheads.inference.drafters.base import Drafter
    from draftheads.inference.drafters.ngram import NgramDrafter
    from draftheads.inference.target import Target

    sizes = contests.QUICK if options.quick else contests.FULL
    checkpoint = open_checkpoint(options.ckpt) if options.ckpt is not None else None
    with Progress() as progress:
        if options.geometry is not None:
            bench = contests.Bench(roofline.random_target(options.geometry, options.device), sizes, progress)
            requests = roofline.random_requests(bench.target, sizes.cost_prompts)
            return {"roofline": roofline.roofline(bench, {}, sizes.tokens, requests)}, bench
        name = options.target or (checkpoint.meta.target if checkpoint is not None else "smollm2-135m")
        bench = contests.Bench(Target.load(name, device=options.device), sizes, progress)
        drafters: dict[str, tuple[Drafter, int]] = {"ngram": (NgramDrafter(), GAMMA["ngram"])}
        if checkpoint is not None:
            loaded = load_drafters(checkpoint, bench.target, ["head"])
            drafters["head"] = (loaded["head"], GAMMA["head"])
        return sections(options, bench, drafters), bench


def sections(options: Options, bench: Any, drafters: Mapping[str, Any]) -> dict[str, Any]:
    """Run the wanted sections one after the other."""
    import contests
    import costs
    import roofline
    from draft_pair import Pair

    wanted, report = options.sections, {}
    if "a" in wanted:
        report["ar_vs_transformers"] = contests.autoregressive(bench)
    pair = Pair.make(bench, options.draft_layers, options.tune_minutes) if set("bd") & set(wanted) else None
    if "b" in wanted and pair:
        report |= costs.cost_model(bench, {**drafters, "draft_model": (pair.drafter, GAMMA["draft_model"])})
    if "c" in wanted:
        report["ngram_vs_transformers"] = contests.lookup(bench, options.gamma)
    if "d" in wanted and pair:
        report["draft_model_vs_transformers"] = pair.against_transformers(bench)
    if "e" in wanted:
        report["by_batch"] = contests.by_batch(bench, drafters, options.batches)
    if "f" in wanted:
        report["roofline"] = roofline.roofline(bench, drafters, bench.sizes.tokens)
    return report


def _sections(only: str, geometry: str | None, device: str | None) -> str:
    import torch

    from draftheads.recipes.schema import RecipeError

    if geometry is not None:
        return "f"
    chosen = [part for part in only.replace(",", " ").split()] or list("abcde") + ["f"] * (torch.cuda.is_available() and device != "cpu")
    if any(part not in SECTIONS or len(part) != 1 for part in chosen):
        raise RecipeError(f"--only {only!r}: wanted letters of sections, {', '.join(SECTIONS)}, with commas between them")
    return "".join(chosen)


def _batches(text: str) -> list[int]:
    from draftheads.recipes.schema import RecipeError

    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise RecipeError(f"--batches {text!r}: wanted whole numbers from 1 on with commas between them, e.g. 1,2,4,8")
    return found


def _provenance(bench: Any, quick: bool, load: float | None) -> dict[str, Any]:
    import torch

    from draftheads.eval.provenance import hardware, versions

    target = bench.target
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": _commit(), "hardware": hardware(target.device),
        "versions": versions(), "threads": torch.get_num_threads(), "load_before": load, "quick": quick, "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."), "packed": target.packed,
        "graphs": target.graphs.status if target.device.type == "cuda" else None,
    }


def _commit() -> str:
    """Of the checkout, with "+" where files differ from it."""
    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, timeout=20).stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        return head + "+" * bool(git("status", "--porcelain")) if head else "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


# ---- the table


def table(report: Mapping[str, Any]) -> str:
    """All figures of the report, one a line: name, value, interval, n, what is wanted."""
    rows = [("", "value", "95 % interval", "n", "wanted", "")]
    for path, f in figures(report):
        interval = "" if not f.get("interval") else f"{f['interval'][0]:.3g} – {f['interval'][1]:.3g}"
        verdict = "" if "met" not in f else "ok" if f["met"] else "MISSED"
        rows.append((path, _number(f["value"]), interval, str(f.get("n", "")), f.get("wanted", ""), verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows]
    for name, (same, total) in report["identical"].items():
        lines.append(f"{name}: {same} of {total} prompts with the same tokens from everybody")
    p = report["provenance"]
    versions = ", ".join(f"{name} {p['versions'][name]}" for name in ("torch", "transformers"))
    where = p["hardware"].get("gpu", p["hardware"]["cpu"])
    lines.append(f"{p['target']}, {p['dtype']}, {p['threads']} threads, {versions}, {where}, commit {p['commit']}, {p['date']}, "
                 f"load before {p['load_before']}")
    return "\n".join(lines)


def figures(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every dict with a "value" in it, with its place, depth first; single numbers beside them count as figures too."""
    if not isinstance(value, dict) or path == "provenance" or path == "identical":
        return [(path, {"value": value})] if isinstance(value, int | float) and not isinstance(value, bool) else []
    found = [(path, value)] if "value" in value else []
    skip = {"value", "interval", "n", "met", "wanted", "drafter"}
    return found + [item for key, inner in value.items() if key not in skip for item in figures(inner, f"{path}.{key}" if path else key)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    from draftheads.eval.cli import guard

    sys.exit(guard("benchmarks/decode.py", lambda: app(standalone_mode=False, prog_name="benchmarks/decode.py")))
