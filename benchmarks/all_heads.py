"""Every head on the same rows with the same budget: train, export, judge by specdec-eval and by vLLM. The table of RESULTS.md.

    python benchmarks/all_heads.py distil  --folder runs/heads                  rows with the union of all taps, once
    python benchmarks/all_heads.py probe   --folder runs/heads                  how many steps the budget allows: on an idle machine
    python benchmarks/all_heads.py train   --folder runs/heads --heads EAGLE-3  15 minutes of one core
    python benchmarks/all_heads.py engine  --folder runs/heads                  export, specdec-eval and vLLM (make env-vllm first)
    python benchmarks/all_heads.py measure --folder runs/heads                  τ of a tree, draft cost, speed-up: on an idle machine
    python benchmarks/all_heads.py table   --folder runs/heads

Every stage keeps what it has finished and goes on from there. A budget in minutes is turned into optimizer steps by a short run of the same recipe,
so that what is trained does not depend on what else the machine does meanwhile. One core, so that two heads may be trained side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNION = [2, 9, 15, 21, 27, 28, "final"]
MINUTES, MOST_EPOCHS, PROBE_STEPS = 15.0, 6.0, 14
PER_CATEGORY, TOKENS, GAMMA = 7, 112, 4
FEW, FEW_TOKENS = 1, 48  # of a category, where a machine must be idle meanwhile
EPOCH_STEPS = 62  # of 2048 tokens
TREE = "dynamic:depth=5,top_k=8,nodes=24"


@dataclass
class Head:
    """recipe: in recipes/; sets: overrides of it; method: vLLM's name, None where no engine loads it; reason: why not, for the table; whole: exported
    over the whole vocabulary, for a layout without a reduced one; tunes: has a target of its own."""

    recipe: str
    sets: dict[str, Any] = field(default_factory=dict)
    entry: str = "eagle"
    method: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    gamma: int = GAMMA
    trees: bool = True
    reason: str = ""
    whole: bool = False
    tunes: bool = False


HEADS = {
    # No layout of EAGLE-1 has a reduced vocabulary, and vLLM loads no such Medusa. With the target's lm_head they are trained over one all the same.
    "Medusa-1": Head("medusa", {"head.freeze_lm_head": True}, entry="medusa", method="medusa", whole=True),
    "Medusa-2": Head("medusa2", {"head.freeze_lm_head": True}, entry="medusa", method="medusa", whole=True, tunes=True),
    "Hydra++": Head("hydra", {"head.prefix_layer": True}, entry="medusa", reason="no engine loads Hydra"),
    "EAGLE-1": Head("eagle", method="eagle", whole=True),
    "HASS": Head("hass", method="eagle", whole=True),
    "EAGLE-3": Head("", {"head.fc_norm": False, "head.norm_output": False}, method="eagle3"),
    "EAGLE-3.1": Head("", method="eagle3"),
    # No deeper than the drafts that are measured: each depth costs as much as a step of EAGLE-3.
    "P-EAGLE": Head("peagle", {"head.depths": GAMMA, "train.unroll": [{"until": 1.0, "steps": GAMMA}]}, method="eagle3",
                    extra={"parallel_drafting": True}, trees=False),
    # One layer: vLLM 0.32's CPU kernel gives all layers of a DFlash head the first one's k_norm (tests/test_vllm.py).
    "DFlash": Head("dflash", {"head.num_layers": 1}, entry="block", method="dflash", trees=False),
    "DSpark": Head("dspark", entry="block", trees=False, reason="vLLM's runner for it wants a GPU"),
}


@dataclass
class Place:
    """limit: prompts to distil, None: the recipe's number; minutes: of one core, for training a head; steps: optimizer steps instead of minutes."""

    folder: Path
    limit: int | None = None
    minutes: float = MINUTES
    steps: int | None = None

    def run(self, name: str) -> Path:
        return self.folder / name

    def results(self, name: str) -> dict[str, Any]:
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return found

    def keep(self, name: str, **values: Any) -> None:
        part = self.folder / f"{name}.json.part"
        part.write_text(json.dumps(self.results(name) | values, indent=1), encoding="utf-8")
        os.replace(part, self.folder / f"{name}.json")


def recipe_of(head: Head) -> Path:
    return ROOT / "recipes" / ("smollm2-135m.yaml" if not head.recipe else f"smollm2-135m-{head.recipe}.yaml")


def rows_of(place: Place) -> dict[str, Any]:
    return {"data.taps": UNION} | ({} if place.limit is None else {"data.limit": place.limit})


def sets_of(head: Head, place: Place, run: Path, **more: Any) -> list[str]:
    values = {**rows_of(place), **head.sets, "data.rows": str(place.run("rows")), "run": str(run), **more}
    return [x for key, value in values.items() for x in ("--set", f"{key}={json.dumps(value)}")]


def call(command: list[str], threads: int) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def distil(place: Place) -> None:
    values = {**rows_of(place), "run": str(place.run("rows"))}
    call([sys.executable, "-m", "draftheads.eval.cli", "distill", "--recipe", str(recipe_of(HEADS["EAGLE-3.1"])),
          *(x for key, value in values.items() for x in ("--set", f"{key}={json.dumps(value)}"))], os.cpu_count() or 1)


def entry_of(head: Head) -> list[str]:
    return [sys.executable, f"train/{head.entry}.py", "--recipe", str(recipe_of(head))]


def probe(place: Place, name: str) -> None:
    """Times some steps of the recipe, stage by stage of its unrolling: wants an idle core."""
    head, run = HEADS[name], place.folder / f"{name}-probe"
    if "steps" in place.results(name):
        return
    if place.steps is not None:
        place.keep(name, steps=place.steps)
        return
    call([*entry_of(head), *sets_of(head, place, run, **{"train.steps": PROBE_STEPS, "train.log_every": 1})], 1)
    records = [json.loads(line) for line in (run / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    steps, seconds = budget(records, place.minutes)
    place.keep(name, steps=steps, seconds_per_step=seconds)
    shutil.rmtree(run)


def train(place: Place, name: str) -> None:
    """As many steps as the budget allows."""
    probe(place, name)
    head = HEADS[name]
    if (place.run(name) / "ckpt" / "final").exists():
        return
    steps, began = place.results(name)["steps"], time.monotonic()
    call([*entry_of(head), *sets_of(head, place, place.run(name), **{"train.steps": steps})], 1)
    place.keep(name, wall_minutes=(time.monotonic() - began) / 60)


def budget(records: list[dict[str, Any]], minutes: float) -> tuple[int, float]:
    """-> steps that the minutes (and MOST_EPOCHS) allow, mean seconds of one. records: all steps of a short run with the same stages of unrolling.

    tokens_per_s counts from the start; the first steps of a stage, which build what later ones find, are left out of its median.
    """
    tokens = 2048.0  # nearly, of each step
    ends = [r["step"] * tokens / r["tokens_per_s"] for r in records]
    spent: dict[int, list[float]] = {}
    for record, begin, end in zip(records[1:], ends, ends[1:], strict=False):
        spent.setdefault(record["unroll"], []).append(end - begin)
    count = sum(map(len, spent.values()))
    seconds = sum(statistics.median(times[len(times) // 3 :]) * len(times) for times in spent.values()) / count
    return min(int(minutes * 60 / seconds), int(MOST_EPOCHS * EPOCH_STEPS)), seconds


def engine(place: Place, name: str) -> None:
    """Export for vLLM; the exported folder by specdec-eval and by vLLM."""
    from judge import agree

    head = HEADS[name]
    if "engine" in place.results(name) or not (place.run(name) / "ckpt" / "final").exists():
        return
    if head.method is None:
        ckpt, target = place.run(name), None
    else:
        ckpt, target = place.folder / "export" / name, place.folder / "target"
        if head.tunes:
            target = place.folder / f"target-{name}"
        also = ([] if target.exists() else ["--target-out", str(target)]) + (["--whole-vocabulary"] if head.whole else [])
        call([sys.executable, "-m", "draftheads.eval.cli", "export", "--ckpt", str(place.run(name)), "--to", "vllm", "--out", str(ckpt), *also],
             os.cpu_count() or 1)
    found = agree(name, ckpt, target, head.method, gamma=head.gamma, per_category=PER_CATEGORY, max_new_tokens=TOKENS, extra=head.extra)
    place.keep(name, engine=found)


def measure(place: Place, name: str) -> None:
    """Draft cost and speed-up, batch 1, against our own autoregressive path; τ of a chain and of a tree, on as few prompts."""
    from draftheads.eval.run import evaluate
    from draftheads.eval.subject import open_checkpoint

    head, run = HEADS[name], place.run(name)
    if not (run / "ckpt" / "final").exists():
        return
    common = {"per_category": FEW, "transformers_fraction": 0.0}
    if "speedup" not in place.results(name):
        options = common | {"max_new_tokens": FEW_TOKENS, "drafters": ["none", "head"], "tau_gamma": head.gamma}
        report = evaluate(open_checkpoint(run, [], options), out=place.folder / "report" / name, quiet=True).report
        place.keep(name, speedup=report["summary"]["speedup"], speedup_ci95=report["summary"]["speedup_ci95"], lossless=report["summary"]["lossless"],
                   gamma=report["summary"]["gamma"], draft_cost=report["cost_model"]["c"].get("head"), tau_timed=report["summary"]["tau"])
    for kind, tree in (("chain", "chain"), ("tree", TREE)):
        if head.trees and f"{kind}_tau" not in place.results(name):
            options = common | {"drafters": ["head"], "max_new_tokens": TOKENS, "ignore_eos": True, "tree": tree, "batch_size": 8,
                                "gamma": head.gamma, "costs": False}
            report = evaluate(open_checkpoint(run, [], options), out=place.folder / kind / name, quiet=True).report
            place.keep(name, **{f"{kind}_tau": report["by_drafter"]["head"]["tau_untrimmed"]})


def table(place: Place) -> str:
    columns = ["head", "trained", "steps, epochs", f"τ chain, γ = {GAMMA}", "chain → tree", "c", "speed-up (95 %)", "vLLM's acceptance length",
               "difference", "same texts"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, head in HEADS.items():
        r = place.results(name)
        e = r.get("engine") or {}
        if not e:
            continue
        ours, theirs = e["tau_untrimmed"], e.get("vllm_acceptance_length")
        fast = f"{r['speedup']:.2f} ({r['speedup_ci95'][0]:.2f}–{r['speedup_ci95'][1]:.2f}) at γ = {r['gamma']}" if "speedup" in r else "–"
        cost = f"{r['draft_cost']:.3f}" if r.get("draft_cost") is not None else "–"
        lines.append(" | ".join([
            f"| {name}", f"{parameters(place.run(name)) / 1e6:.1f} M", f"{r['steps']}, {r['steps'] / EPOCH_STEPS:.1f}", f"{ours:.3f}",
            f"{r['chain_tau']:.2f} → {r['tree_tau']:.2f}" if "tree_tau" in r else "–", cost, fast, f"{theirs:.3f}" if theirs else head.reason or "–",
            f"{e['difference']:+.2%}" if theirs else "–", f"{e['same_texts']} of {e['prompts']} |" if theirs else "– |"]))
    return "\n".join(lines)


def parameters(run: Path) -> int:
    """Of the trained tensors: what the checkpoint holds, without the vocabulary's maps."""
    from safetensors import safe_open

    total = 0
    for file in [run / "ckpt" / "final" / "model.safetensors", *(run / "ckpt" / "final").glob("adapter/*.safetensors")]:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                shape = tensors.get_slice(key).get_shape()
                size = 1
                for n in shape:
                    size *= n
                total += size if key not in ("d2t", "t2d") else 0
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("distil", "probe", "train", "engine", "measure", "table"))
    parser.add_argument("--folder", type=Path, default=Path("runs/heads"))
    parser.add_argument("--limit", type=int, help="prompts to distil; default: the recipe's")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of one core, for training each head")
    parser.add_argument("--heads", help="names separated by commas; default: all")
    options = parser.parse_args()
    place = Place(options.folder.absolute(), options.limit, options.minutes)
    place.folder.mkdir(parents=True, exist_ok=True)
    names = options.heads.split(",") if options.heads else list(HEADS)
    unknown = [n for n in names if n not in HEADS]
    if unknown:
        parser.error(f"no head {unknown[0]!r}; there are {', '.join(HEADS)}")
    if options.stage == "distil":
        distil(place)
    elif options.stage == "table":
        print(table(place))
    else:
        for name in names:
            print(f"== {options.stage} {name}", file=sys.stderr, flush=True)
            {"probe": probe, "train": train, "engine": engine, "measure": measure}[options.stage](place, name)


if __name__ == "__main__":
    main()
