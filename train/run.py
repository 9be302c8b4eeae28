"""run.main: recipe → a trained head in <run>/ckpt/final. Everything that can be wrong is checked before the long work.

    recipe ─► accelerator ─► finished? ─► target ─► distil (main process) ─► survey, vocabulary ─► head ─► fit ─► save

The same command again resumes: distillation by shards, training by states, and a finished run says so and returns.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

from draftheads.data.distill import distill, same_prompts
from draftheads.data.features import RowStore, rows_folder
from draftheads.heads import build_head, head_config, head_section
from draftheads.heads.base import DraftHead
from draftheads.heads.checkpoint import HeadMeta, read_meta, save_head
from draftheads.heads.formats.transfer import public_name
from draftheads.heads.losses import CONFIDENCE, STATES
from draftheads.inference.adapter import try_adapter, write_adapter
from draftheads.inference.saving import STAMP
from draftheads.inference.target import load_target
from draftheads.recipes.files import recover_folder, write_json, write_text
from draftheads.recipes.schema import Geometry, Recipe, RecipeError
from draftheads.train.examples import Examples, draft_vocabulary, key, survey, target_features, vocabulary_bounds
from draftheads.train.loop import fit
from draftheads.train.resume import check_facts, facts_of, newest_state
from draftheads.train.step import TrainStep, chunk_size
from draftheads.train.timetable import Schedule
from draftheads.train.trackers import tracker_names
from draftheads.train.tuned import Tuned

LOCK_WAIT_S = 60.0  # a killed launcher's process may still be writing its last state


def main(recipe: Recipe) -> int:
    """Train what the recipe says, or go on with it. Returns the exit code: 0, or 128 + the signal that stopped it. RecipeError on bad input."""
    head_section(recipe.head)
    if recipe.target.geometry is not None:
        head_config(recipe.head, recipe.target.geometry)
    accelerator = make_accelerator(recipe)
    say = partial(print, file=sys.stderr, flush=True) if accelerator.is_main_process else lambda *_: None
    say(greeting(recipe, accelerator))
    with locked(recipe.run_dir, accelerator.is_main_process, say):
        if accelerator.is_main_process:
            recover_folder(recipe.run_dir / "ckpt" / "final")
        accelerator.wait_for_everyone()
        if finished(recipe):
            say(f"this run is finished: {recipe.run_dir / 'ckpt' / 'final'}; measure it with specdec-eval --ckpt {recipe.run_dir}")
            return 0
        return train(recipe, accelerator, say)


def train(recipe: Recipe, accelerator: Accelerator, say: Any) -> int:
    section, final = recipe.train, recipe.run_dir / "ckpt" / "final"
    target = load_target(recipe.target, device=accelerator.device)
    if target.adapter is not None:
        raise RecipeError(f"{recipe.target.name} is the tuned target of another head (specdec export --target-out): a head trained on it could not "
                          f"be told from that one's; train on a copy without {STAMP}, which is a model like any other")
    if section.lora is not None:
        if getattr(target.model.config, "quantization_config", None):
            raise RecipeError("train.lora cannot be merged into a quantised target: name the unquantised one")
        try_adapter(target.model, section.lora)
    size = getattr(head_config(recipe.head, target.geometry), "draft_vocab_size", None)
    if size is not None:  # before the long work
        vocabulary_bounds(size, target)
    check_head(recipe, target.geometry)
    if accelerator.is_main_process:
        distill(recipe, target=target)
    accelerator.wait_for_everyone()
    store = RowStore.open(rows_folder(recipe))
    online = recipe.data.features == "online"
    if not online:
        store = store.select(head_config(recipe.head, target.geometry).taps)
    found = survey(store, section, target.geometry.vocab_size)
    draft_ids = draft_vocabulary(found, size, target) if size is not None else None
    if draft_ids is not None and not found.labels_V[draft_ids].any():
        raise RecipeError(f"the draft vocabulary of {size} tokens holds none of the {int(found.labels_V.sum()):,} tokens to learn: "
                          "raise head.draft_vocab_size, or train.max_len if it cuts the answers off")

    tuned = None
    if section.lora is not None:
        torch.manual_seed(key(section.seed, 0))  # of its own, so that the head begins as it does without an adapter
        taps = head_config(recipe.head, target.geometry).taps
        own = target if not online and not target.packed else load_target(recipe.target, device=accelerator.device, packed=False)
        tuned = Tuned(own, section.lora, tuple(taps))
    torch.manual_seed(section.seed)
    head = build_head(recipe.head, target.geometry, draft_ids)
    head.borrow(target.embed_VD, target.lm_head_VD)
    step = TrainStep(head, target.lm_head_VD[step_ids(head).to(target.device)], target.finish_logits, section.loss, tuned)
    chunk = chunk_size(section, len(step.target_ids_U), accelerator.device)
    known_V = step.known_V.cpu()
    examples = Examples(store, section, known_V, width=len(head.taps) * target.geometry.hidden_size, hidden=target.geometry.hidden_size,
                        chunk=chunk, fill=partial(target_features, target, tuple(head.taps)) if online else None,
                        thin=head.thin if type(head).thin is not DraftHead.thin else None, device=accelerator.device)
    schedule = Schedule(section, found.rows, found.lengths, found.shares(store, section, known_V), accelerator.num_processes)
    meta = HeadMeta(target=recipe.target.name, revision=target.revision, template_hash=target.template_hash, recipe_hash=recipe.hash(),
                    data_hash=store.hash)
    if not online:
        del target  # its tables live on in the head; its layers need no memory during training

    facts = facts_of(recipe, store.hash)
    state, damaged = newest_state(recipe.run_dir / "ckpt", clean=accelerator.is_main_process)
    for line in damaged:
        say(line)
    if state is not None:
        check_facts(state.facts, facts, state.folder)
    elif accelerator.is_main_process:  # DDP hands its weights to the others
        head.to(accelerator.device)
        clean = replace(examples, train=section.model_copy(update={"feature_noise": 0.0}))
        head.fit_start(clean.prepare([row], steps=1, step=0)[0].to(accelerator.device).batch for row in found.rows)
    if accelerator.is_main_process:
        write_text(recipe.run_dir / "recipe.yaml", recipe.dump())
        write_json(recipe.run_dir / "provenance.json", provenance(recipe, store.hash, accelerator))
    say(overview(found, schedule, step, known_V, state.step if state is not None else 0))
    stopper = Stopper(accelerator, section.log_every)
    figures = fit(step, examples, schedule, recipe, accelerator, facts, state=state, stop=stopper)
    if figures is None:
        say(f"stopped by {stopper.reason}; the same command goes on from {recipe.run_dir / 'ckpt'}")
        return stopper.exit_code
    if accelerator.is_main_process:
        extra = {"facts": facts, "steps": len(schedule.steps())}
        adapter = None if tuned is None else partial(write_adapter, tuned.model, public_name(recipe.target.name), meta.revision)
        save_head(head, final, meta.model_copy(update={"metrics": figures, "extra": extra}), adapter)
    accelerator.wait_for_everyone()
    say(f"done: {final}  (teacher-forced τ {figures['tau']:.2f}, loss {figures['loss']:.3f}); measure it: specdec-eval --ckpt {recipe.run_dir}")
    return 0


def check_head(recipe: Recipe, geometry: Geometry) -> None:
    """RecipeError, before the long work, if train.unroll or train.loss ask of the head what it cannot do."""
    with torch.device("meta"):
        head = build_head(recipe.head, geometry)
    for steps in sorted({stage.steps for stage in recipe.train.unroll}):
        head.check_steps(steps)
    for needed, method in ((STATES, "regressed"), (CONFIDENCE, "confidence")):
        if (asked := needed & recipe.train.loss.keys()) and getattr(type(head), method) is getattr(DraftHead, method):
            raise RecipeError(f"train.loss has {', '.join(asked)}, which head {recipe.head['type']} makes no prediction for; leave it out")


def step_ids(head: Any) -> torch.Tensor:
    ids: torch.Tensor = head.target_ids(torch.arange(head.d2t.numel()))
    return ids


def finished(recipe: Recipe) -> bool:
    """ckpt/final exists and is this recipe's. RecipeError when it is another's."""
    final = recipe.run_dir / "ckpt" / "final"
    if not final.exists():
        return False
    meta = read_meta(final)
    data_hash = meta.data_hash or ""
    with suppress(OSError, ValueError, KeyError):  # rows that were made anew want another head; rows that are gone don't
        data_hash = json.loads((rows_folder(recipe) / "manifest.json").read_text(encoding="utf-8"))["hash"]
    check_facts(meta.extra.get("facts", {}), facts_of(recipe, data_hash), final)
    if same_prompts(recipe) is False:  # the rows that are here are its own, but the recipe asks for others by now
        raise RecipeError(f"{final} was trained on other prompts than data.prompts and data.limit ({recipe.data.limit}) select now. "
                          "Restore them, or give a new run folder: --set run=DIR")
    return True


def make_accelerator(recipe: Recipe) -> Accelerator:
    """On CPUs `cpu=True` must be said in the script, or several processes do not find each other."""
    cuda = torch.cuda.is_available()
    precision = recipe.train.precision
    bf16 = precision == "bf16" or precision == "auto" and cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    names = tracker_names(recipe)
    accelerator = Accelerator(
        cpu=not cuda, mixed_precision="bf16" if bf16 else "no", log_with=names or None, project_dir=str(recipe.run_dir),
        # Distillation runs on the main process; the others wait for it as long as it takes.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False), InitProcessGroupKwargs(timeout=timedelta(days=7))],
    )
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise RecipeError(f"accelerate is set to {accelerator.distributed_type.value}; this version trains under DDP (NO, MULTI_CPU, MULTI_GPU)")
    return accelerator


def greeting(recipe: Recipe, accelerator: Accelerator) -> str:
    world = accelerator.num_processes
    line = (f"training on {world} process{'es' if world > 1 else ''} ({accelerator.distributed_type.value}, {accelerator.device.type}, "
            f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}, {accelerator.mixed_precision}) → {recipe.run_dir}")
    asked = launched_with()
    if asked is not None and asked > world:
        line += (f"\naccelerate launch was asked for {asked} processes and started {world}: --cpu silently starts one. Use\n  accelerate launch "
                 f"--multi_gpu --num_processes {asked} --num_machines 1 --mixed_precision no --dynamo_backend no train/eagle.py …")
    return line


def launched_with() -> int | None:
    """--num_processes of the launcher, where the system shows its command line; None where it can't be known."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return int(words[words.index("--num_processes") + 1])
    except (OSError, ValueError, IndexError):
        return None


def overview(found: Any, schedule: Schedule, step: TrainStep, known_V: torch.Tensor, done: int) -> str:
    slots = int(found.labels_V.sum())
    trained, adapted = (sum(p.numel() for p in parameters) for parameters in (step.head.trainable_parameters(), step.adapter()))
    lost = [f"{n} {what}" for n, what in ((found.cut, "cut at train.max_len"), (found.empty, "left out: no loss slot")) if n]
    return (f"{len(found.rows)} rows{' (' + ', '.join(lost) + ')' if lost else ''}, {slots:,} loss slots an epoch, draft vocabulary "
            f"{int(known_V.sum())} covers {int(found.labels_V[known_V].sum()) / slots:.1%} of them; {trained / 1e6:.1f} M parameters"
            f"{f' and {adapted / 1e6:.1f} M of the adapter' if adapted else ''}, "
            f"{len(schedule.steps())} steps" + (f", going on after step {done}" if done else ""))


def provenance(recipe: Recipe, data_hash: str, accelerator: Accelerator) -> dict[str, Any]:
    packages = ("draftheads", "torch", "transformers", "accelerate", "safetensors", "numpy", *(("peft",) if recipe.train.lora else ()))
    return {
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
        "git_commit": git_commit(),
        "machine": {"platform": platform.platform(), "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                    "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type},
        "processes": accelerator.num_processes, "threads": torch.get_num_threads(), "precision": accelerator.mixed_precision,
        "recipe_hash": recipe.hash(), "data_hash": data_hash,
    }


def git_commit() -> str | None:
    """Of the checkout this runs from; None for an installed package, or without git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


@contextmanager
def locked(run: Path, main: bool, say: Any) -> Iterator[None]:
    """One training process group per run folder; the lock goes with its process, however that ends."""
    if not main:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".train.lock").open("w") as handle:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() - began > LOCK_WAIT_S:
                    raise RecipeError(f"another process is training in {run}; wait for it, or give this run another folder: --set run=DIR") from None
                if time.monotonic() - began < 1:
                    say(f"another process is training in {run}; waiting for {LOCK_WAIT_S:.0f} s")
                time.sleep(1)
        yield


class Stopper:
    """stop(steps done) for fit: True after SIGTERM or Ctrl-C, or when accelerate's launcher has died under us (it kills nobody)."""

    def __init__(self, accelerator: Accelerator, every: int) -> None:
        self.accelerator, self.every = accelerator, every
        self.signal: int | None = None
        self.parent = os.getppid() if "ACCELERATE_MIXED_PRECISION" in os.environ else None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C is meant

    def __call__(self, done: int) -> bool:
        if self.signal is None and self.parent is not None and os.getppid() != self.parent:
            self.signal = signal.SIGTERM
        if self.accelerator.num_processes == 1:
            return self.signal is not None
        if self.accelerator.device.type != "cpu" and done % self.every:
            return False  # asking the others stalls the stream
        wish = torch.tensor(float(self.signal is not None), device=self.accelerator.device)
        return bool(self.accelerator.reduce(wish, "sum") > 0)

    @property
    def reason(self) -> str:
        return signal.Signals(self.signal).name if self.signal is not None else "another process"

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or signal.SIGTERM)
