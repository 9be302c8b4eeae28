"""Timing that compares like with like: the same prompts, the same machine state, interleaved, decode only.

Clocks here tick between the yields of `decode()`, so everything a round costs is in (drafting, verifying, accepting, committing, the
drafters' catching up, Python), and prefill is out. transformers' `generate` is timed by a streamer: the clock starts when the first token
arrives, which is the end of its prefill, and stops at the last one; it pays for no more than we do. Its assisted generation verifies a
draft in the prefill already: the tokens that come with it are left out like the first one.

    blocks of prompts ─► run every contender on the block, in an order that rotates from block to block ─► Timed per contender and block

The cost model's parts come from the same loop: a filler drafter of exact length gives v(w), the real drafter at several γ gives its step
cost c as a slope and the rest of a round o as what is left.

Shape suffixes: B rows, T tokens, N tree nodes, M pairs of a round, G drafted tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference import sources
from draftheads.inference.adapter import tune
from draftheads.inference.decode import decode
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Completion, Limits, Request, Round, Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.inference.target import Target


@dataclass
class Timed:
    """One contender on one block. decode_tokens leaves out each row's tokens that belong to the prefill; forwards counts the target's
    after it, so that decode_tokens / forwards is τ at batch 1."""

    completions: list[Completion]
    decode_s: float
    prefill_s: float
    prefill_tokens: int = 1
    forwards: int = 0

    @property
    def decode_tokens(self) -> int:
        return sum(max(0, len(c.tokens) - self.prefill_tokens) for c in self.completions)


def timed_decode(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, limits: Limits, *, plan: Plan, batch_size: int = 1,
    on_round: Callable[[Round], None] | None = None, certificate: bool = False, **options: Any,
) -> Timed:
    """Decode a block and sum the time between yields: rounds of width 0 are prefills, the others decoding. options: decode's."""
    done: list[Completion] = []
    decode_s = prefill_s = 0.0
    forwards = 0
    rounds = decode(target, drafter, requests, sampling, limits, batch_size=batch_size, plan=plan, certificate=certificate, **options)
    synchronize(target.device)
    start = time.perf_counter()
    for r in rounds:
        now = time.perf_counter()
        if r.width:
            decode_s += now - start
            forwards += 1
        else:
            prefill_s += now - start
        done += r.finished
        if on_round is not None:
            on_round(r)
        start = time.perf_counter()
    order = {r.id: i for i, r in enumerate(requests)}
    return Timed(sorted(done, key=lambda c: order[c.request.id]), decode_s, prefill_s, forwards=forwards)


def plain_model(target: Target, *, trust_remote_code: bool = False) -> Any:
    """The target once more as transformers gives it (an adapter merged): weights unpacked, its own attention, no defaults of generation_config but
    the plain ones (a repetition penalty would make another model of it)."""
    from transformers import GenerationConfig

    source = sources.locate(target.name, target.revision)
    model, _, _ = sources.load(source, target.dtype, target.device, trust_remote_code, None)
    model.requires_grad_(False)
    tune(model, source, target.adapter)
    model.generation_config = GenerationConfig()
    return model


def timed_generate(
    model: Any, requests: Sequence[Request], sampling: Sampling, limits: Limits, *, eos_ids: Sequence[int], pad_id: int, **options: Any
) -> Timed:
    """transformers' own `generate` on the block, left-padded, with its default cache and attention. Greedy unless temperature > 0.

    options: generate's, e.g. prompt_lookup_num_tokens or assistant_model (these take one request at a time). Stop strings are not passed
    on. Rows that end early are padded by generate; the padding is not counted.
    """
    device = next(model.parameters()).device
    ids_BT, mask_BT = _left_pad([r.prompt_ids for r in requests], pad_id, device)
    clock = _Clock(device)
    sampled = sampling.temperature > 0
    warpers = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p} if sampled else {}
    if sampled:
        torch.manual_seed(requests[0].seed)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.register_forward_hook(count)
    synchronize(device)
    start = time.perf_counter()
    try:
        with torch.no_grad():
            out_BT = model.generate(
                ids_BT, attention_mask=mask_BT, max_new_tokens=limits.max_new_tokens, do_sample=sampled, streamer=clock, pad_token_id=pad_id,
                eos_token_id=None if limits.ignore_eos else sorted(eos_ids), **warpers, **options,
            )
    finally:
        handle.remove()
    new_BT = out_BT[:, ids_BT.shape[1] :].tolist()
    tokens = [_until_end(row, () if limits.ignore_eos else eos_ids) for row in new_BT]
    done = [
        Completion(r, row, "eos" if row and row[-1] in eos_ids else "length") for r, row in zip(requests, tokens, strict=True)
    ]
    first, last = clock.stamps[1], clock.stamps[-1]  # stamps[0] is the prompt
    return Timed(done, last - first, first - start, clock.first_tokens, forwards - 1)


class _Clock:
    """A streamer (duck-typed BaseStreamer): generate hands it the prompt, then each step's tokens as soon as they are known."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stamps: list[float] = []
        self.first_tokens = 1  # of each row, with the prefill

    def put(self, value: Tensor) -> None:
        synchronize(self.device)
        self.stamps.append(time.perf_counter())
        if len(self.stamps) == 2 and value.dim() == 2:  # assisted generation hands over a block [1, T], plain generation one token a row
            self.first_tokens = value.shape[1]

    def end(self) -> None:
        pass


def _left_pad(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(p) for p in prompts)
    ids = [[pad_id] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _until_end(row: list[int], eos_ids: Sequence[int]) -> list[int]:
    end = next((i for i, t in enumerate(row) if t in eos_ids), len(row) - 1)
    return row[: end + 1]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rotation(names: Sequence[str], block: int) -> list[str]:
    """The order of the contenders on this block: drift of the machine (heat, neighbours) must not favour whoever comes first."""
    shift = block % len(names) if names else 0
    return [*names[shift:], *names[:shift]]


# ---- cost model


class Filler(NoDrafter):
    """Proposes exactly γ copies of the last token: useless drafts of exact length, to measure v(w)."""

    name = "filler"

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        root_B = super().propose(plan, sampling, noise).tokens_BN[:, 0]
        tree = DraftTree.chain(root_B, root_B[:, None].expand(-1, min(plan.gamma, *plan.room_B) if plan.room_B else plan.gamma))
        tree.source_B = [self.name] * len(root_B)
        return tree


@dataclass
class CostSamples:
    """Seconds per round: verify_s[w], rest_s (round − draft − verify), and per drafter draft_s[γ]."""

    verify_s: dict[int, list[float]] = field(default_factory=dict)
    rest_s: dict[str, list[float]] = field(default_factory=dict)
    draft_s: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)  # whole rounds of drafter none


def sample_costs(
    target: Target, drafters: Mapping[str, tuple[Drafter, Sequence[int]]], requests: Sequence[Request], *, fillers: Sequence[int],
    rounds: int = 8, repeats: int = 2, on_pass: Callable[[], None] | None = None,
) -> CostSamples:
    """Rounds of drafter none, of the filler at each γ of `fillers` (exact verify width γ+1), and of every drafter at each of its γ.

    Greedy, end tokens ignored, all requests as one batch. The passes are gone through `repeats` times, so that drift meets all of them; the
    first round of each pass is dropped (caches are cold).
    """
    samples = CostSamples()
    passes: list[tuple[str, Drafter, int]] = [("none", NoDrafter(), 0), *(("filler", Filler(), g) for g in fillers)]
    passes += [(name, drafter, g) for name, (drafter, gammas) in drafters.items() for g in gammas]
    block = list(requests)
    for _ in range(repeats):
        for name, drafter, gamma in passes:
            # Every round writes at least one token: enough room for `rounds` rounds, whatever is accepted.
            limits = Limits(max_new_tokens=rounds * (gamma + 1) + gamma + 2, max_len=_room(block, rounds, gamma), ignore_eos=True)
            _one_pass(samples, target, name, drafter, gamma, block, limits, rounds)
            if on_pass is not None:
                on_pass()
    return samples


def _room(block: Sequence[Request], rounds: int, gamma: int) -> int:
    return max(len(r.prompt_ids) for r in block) + rounds * (gamma + 1) + 2 * (gamma + 2)


def _one_pass(
    samples: CostSamples, target: Target, name: str, drafter: Drafter, gamma: int, block: Sequence[Request], limits: Limits, rounds: int
) -> None:
    seen = 0
    for r in decode(target, drafter, block, Sampling(), limits, batch_size=len(block), plan=Plan(gamma=max(gamma, 1)), timed=True):
        if not r.width:
            continue
        seen += 1
        if seen > 1:
            if name in ("none", "filler"):
                samples.verify_s.setdefault(r.width, []).append(r.t_verify)
                if name == "none":
                    samples.step_s.append(r.t_total)
            else:
                samples.rest_s.setdefault(name, []).append(r.t_total - r.t_draft - r.t_verify)
                samples.draft_s.setdefault(name, {}).setdefault(r.width - 1, []).append(r.t_draft)
        if seen > rounds:
            break


def fit_costs(samples: CostSamples) -> dict[str, Any]:
    """{"t_ar_s", "widths", "v", "c", "o"} in units of one autoregressive step (see eval.cost_model.Costs); v between widths is interpolated."""
    t_ar = _typical(samples.step_s)
    known = {w: _typical(s) / t_ar for w, s in sorted(samples.verify_s.items())}
    widths = list(known)
    v = []
    for w in range(1, widths[-1] + 1):
        below, above = max(k for k in widths if k <= w), min(k for k in widths if k >= w)
        share = (w - below) / (above - below) if above > below else 0.0
        v.append(known[below] + share * (known[above] - known[below]))
    c: dict[str, float] = {}
    o: dict[str, float] = {}
    for name, by_gamma in samples.draft_s.items():
        slope, start = _line({g: _typical(s) for g, s in by_gamma.items()})
        c[name] = max(0.0, slope) / t_ar
        o[name] = max(0.0, start + _typical(samples.rest_s[name])) / t_ar
    return {"t_ar_s": t_ar, "widths": widths, "v": v, "c": c, "o": o}


def _typical(seconds: Sequence[float]) -> float:
    """The lower quartile: what a busy neighbour adds is always positive, and the minimum would be luck."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Least squares y = slope·x + start; one point: all of it is the start, none of it the slope."""
    if len(points) < 2:
        return 0.0, next(iter(points.values()))
    x_mean, y_mean = statistics.fmean(points), statistics.fmean(points.values())
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points.items()) / sum((x - x_mean) ** 2 for x in points)
    return slope, y_mean - slope * x_mean
