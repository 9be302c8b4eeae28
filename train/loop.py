"""fit: the only training loop, for one process or many, whatever the head.

    schedule ─► step s: batch (seed, epoch, index), unroll steps, rate ─► micro-batches: forward, backward ─► clip ─► optimizer ─► log, state

A step's batch is a pure function of the recipe and the rows' lengths: the same for every number of processes, and after a resumption.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftheads.recipes.schema import Recipe, RecipeError
from draftheads.train.examples import Examples, key
from draftheads.train.figures import Window, summarise
from draftheads.train.optimizers import make_optimizer
from draftheads.train.resume import State, load_state, save_state
from draftheads.train.step import TrainStep
from draftheads.train.timetable import Schedule, costs, head_weight, rate, unroll_steps
from draftheads.train.trackers import Trackers, View

SAVE_EVERY_S = 120.0  # beside train.checkpoint_every, where it costs little: a state changes nothing but what a kill costs


def fit(
    step_module: TrainStep, examples: Examples, schedule: Schedule, recipe: Recipe, accelerator: Any, facts: dict[str, Any], *,
    state: State | None = None, stop: Callable[[int], bool] = lambda done: False,
) -> dict[str, Any] | None:
    """Train step_module.head in place, and with train.lora the adapter of step_module.tuned.

    Returns the figures of the last log window, or None if `stop(steps done)` ended it (a state is written).

    stop is asked after every step and must answer alike on every process. RecipeError when the loss is no longer finite.
    """
    train, head, ckpt = recipe.train, step_module.head, recipe.run_dir / "ckpt"
    timetable = schedule.steps()
    total, most, stopping = len(timetable), max(s.steps for s in train.unroll), False
    figures: dict[str, Any] = {}
    cost, begin = costs(total, train), state.step if state is not None else 0
    module, optimizer = accelerator.prepare(step_module, make_optimizer(head.trainable_parameters(), train, step_module.adapter()))
    if state is not None:
        load_state(state, step_module, optimizer)
    window = Window(most, state.window if state is not None and state.window and accelerator.is_main_process else None)
    window.updates = int(state.window["updates"][0]) if state is not None and state.window else 0
    on_cpu = accelerator.device.type == "cpu"  # elsewhere reading a figure stalls the stream: only where it is logged or saved
    trackers, saved, save_s = Trackers(recipe, accelerator, begin), time.monotonic(), 0.0
    with View(total, begin, accelerator.is_main_process) as view:
        for done in range(begin + 1, total + 1):
            epoch, index = timetable[done - 1]
            batch = schedule.epoch(epoch)[index]
            micros = [[schedule.rows[i] for i in micro] for micro in batch[accelerator.process_index]]
            steps, lr, weight = unroll_steps(done - 1, total, train), rate(done - 1, total, train), head_weight(done - 1, total, train)
            # ------------------------------------------------------------ one training step
            torch.manual_seed(key(train.seed, done, accelerator.process_index))
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            for number, rows in enumerate(micros):
                aligned, chunks = examples.prepare(rows, steps=steps, step=done)
                held = [h.to(accelerator.device) for h in examples.held(aligned)]
                aligned, chunks = aligned.to(accelerator.device), [c.to(accelerator.device) for c in chunks]
                with contextlib.nullcontext() if number + 1 == len(micros) else accelerator.no_sync(module):
                    loss, sums = module(aligned, chunks, schedule.normaliser(batch), held, weight)
                    accelerator.backward(loss * accelerator.num_processes)  # DDP takes the processes' mean; the loss is their sum
                window.add(sums)
            norm = accelerator.clip_grad_norm_(step_module.trainable_parameters(), train.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            # ------------------------------------------------------------
            window.updates += 1
            view.advance(schedule.tokens(batch))
            log_now = done % train.log_every == 0 or done == total
            stopping = done < total and stop(done)
            save_now = done < total and (stopping or done % train.checkpoint_every == 0)
            if on_cpu or log_now or save_now:
                totals = window.totals(accelerator)
                figures = summarise(totals, steps)
                _check_finite(figures["loss"] + figures.get("kl", 0.0), done, ckpt, train.lora is not None)
                view.show(figures, (cost[total] - cost[done]) / (cost[done] - cost[begin]))
            if log_now:
                trackers.log(done, {**figures, "epoch": epoch, "lr": lr, "grad_norm": float(norm), "unroll": steps,
                                    "tokens_per_s": round(view.speed(), 1)})
                window, totals = Window(most), {}
            overdue = on_cpu and time.monotonic() - saved > max(SAVE_EVERY_S, 30 * save_s)
            if accelerator.is_main_process and done < total and (save_now or overdue):
                began = time.monotonic()
                save_state(ckpt, done, step_module.saved(), optimizer.state_dict(), facts, totals, train.keep)
                saved, save_s = time.monotonic(), time.monotonic() - began
            if stopping:
                break
    trackers.close()
    return None if stopping else figures


def _check_finite(loss: float, done: int, ckpt: Path, lora: bool) -> None:
    if not math.isfinite(loss):
        rates = "train.lr, train.lora.lr, train.lora.alpha" if lora else "train.lr"
        raise RecipeError(f"the loss is {loss} at step {done}; lower {rates} or train.clip_norm. The states in {ckpt} are from before it")
