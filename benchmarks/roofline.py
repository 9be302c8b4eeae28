"""Section (f): how close to what the memory allows. One token reads every weight once, so bytes of weights / bandwidth is the least a step takes.

    copy micro-benchmark ─► bandwidth ─► roofline ─► share reached by autoregressive steps and by draft steps
    rounds under the profiler ─► device-to-host copies per round          decode(graphs=False | True) ─► eager against graphed steps

Weights may be random (`geometry`): time does not depend on them. The same functions run on a CPU, without graphs and copies.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from contests import Bench, contest, limits_for, ratio, speed
from costs import over, sample, verify_costs

from draftheads.heads import build_head
from draftheads.heads.base import DraftHead
from draftheads.inference.decode import decode
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.measure import synchronize
from draftheads.inference.requests import Request, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import Geometry, RecipeError

GEOMETRIES = {
    "tiny": Geometry(
        hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=128, max_positions=1024,
    ),
    "llama-3.1-8b": Geometry(
        hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
        max_positions=131072, rms_norm_eps=1e-5, rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}
DRAFT_VOCAB, PROMPT, PROFILED = 32000, 200, 16
AR_SHARE, V8, C_TIMES, COPY_BYTES = 0.6, 1.10, 1.5, 1024


def random_target(name: str, device: str | None) -> Target:
    """A target of this geometry with random weights, made on the device: bfloat16 on a GPU, float32 (packed) on a CPU. No tokenizer."""
    from transformers import AutoModelForCausalLM

    if name not in GEOMETRIES:
        raise RecipeError(f"--geometry {name} is not known; there are {', '.join(GEOMETRIES)}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(0)
    with where:
        model = AutoModelForCausalLM.from_config(config_of(GEOMETRIES[name]), dtype=torch.bfloat16 if where.type == "cuda" else torch.float32)
    return Target.from_model(model.requires_grad_(False), None, name=f"random {name}", packed=where.type == "cpu")


def config_of(geometry: Geometry) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=geometry.hidden_size, intermediate_size=geometry.intermediate_size, num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_heads, num_key_value_heads=geometry.num_kv_heads, head_dim=geometry.head_dim,
        vocab_size=geometry.vocab_size, max_position_embeddings=geometry.max_positions, rms_norm_eps=geometry.rms_norm_eps,
        rope_parameters=geometry.rope_parameters, tie_word_embeddings=geometry.tie_word_embeddings, eos_token_id=None,
    )


def random_head(target: Target) -> DraftHead:
    """An EAGLE-3 head with random weights for this target, its draft vocabulary at most 32k."""
    size = min(DRAFT_VOCAB, target.geometry.vocab_size)
    return build_head({"type": "eagle3", "draft_vocab_size": size, "taps": _taps(target)}, target.geometry)


def _taps(target: Target) -> list[int]:
    layers = target.geometry.num_layers
    return sorted({min(2, layers - 1), layers // 2, max(layers - 3, 1)})


# ---- bytes and bandwidth


def weight_bytes(target: Target) -> int:
    """Bytes of weights that one token reads: all but the input embedding, of which it reads a row (tied, it is read as lm_head). Mixtures of
    experts read less than this."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # the target's own linears may be packed, which have no parameters
        model = AutoModelForCausalLM.from_config(target.model.config, dtype=target.dtype)
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        sizes.pop(id(model.get_input_embeddings().weight))
    return sum(sizes.values())


def step_bytes(head: DraftHead, element: int) -> int:
    """Bytes of weights that one draft step of the head reads: its matrices, the rows of its draft vocabulary included. `fc` joins the taps,
    once a round."""
    matrices: dict[str, Any] = {name: m for name, m in head.named_modules() if hasattr(m, "in_features")}  # packed ones are no nn.Linear
    return sum(m.in_features * m.out_features * element for name, m in matrices.items() if name != "fc")


def bandwidth(device: torch.device, megabytes: int | None = None, repeats: int = 20) -> float:
    """Bytes per second that a device-to-device copy moves, read and written, in the best quarter of the repeats."""
    size = (megabytes or (1024 if device.type == "cuda" else 128)) * 2**20
    source, goal = torch.zeros(size, dtype=torch.uint8, device=device), torch.ones(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        goal.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / statistics.quantiles(seconds, n=4)[0]


# ---- copies


def host_copies(bench: Bench, drafter: Drafter, gamma: int, request: Request) -> dict[str, Any] | None:
    """Device-to-host copies of PROFILED rounds by torch.profiler: per round, and the largest in bytes. None on a CPU."""
    if bench.target.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    rounds = decode(bench.target, drafter, [request], Sampling(), limits_for([request], 4 * (gamma + 1) * PROFILED), plan=Plan(gamma=gamma))
    for _ in range(4):  # prefill, and what is captured or compiled on first sight
        next(rounds)
    synchronize(bench.target.device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        counted = sum(1 for _ in zip(range(PROFILED), rounds, strict=False))
        synchronize(bench.target.device)
    rounds.close()  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        sizes = copies_in(json.loads(path.read_text())["traceEvents"])
    most = max(sizes, default=0)
    return {"per_round": len(sizes) / counted, "largest_bytes": most, "rounds": counted, "wanted": f"1 a round, <= {COPY_BYTES} bytes",
            "met": len(sizes) <= counted and most <= COPY_BYTES}


def copies_in(events: Iterable[dict[str, Any]]) -> list[int]:
    """Sizes in bytes of the device-to-host copies in a Chrome trace."""
    return [int(e["args"]["bytes"]) for e in events if e.get("cat") == "gpu_memcpy" and "DtoH" in e.get("name", "")]


# ---- the section


def roofline(bench: Bench, drafters: Mapping[str, tuple[Drafter, int]], tokens: int, requests: Sequence[Request] | None = None) -> dict[str, Any]:
    """(f) Shares of the roofline, eager against graphed steps, copies. A random head stands in where no head is given."""
    target = bench.target
    head = drafters["head"][0] if "head" in drafters else HeadDrafter(random_head(target), target)
    assert isinstance(head, HeadDrafter)
    requests = list(requests or bench.others(bench.sizes.cost_prompts, 256))
    peak, weights = bandwidth(target.device), weight_bytes(target)
    costs = sample(bench, {"head": head}, requests)
    contenders = {name: bench.ours(NoDrafter(), **options) for name, options in graph_options(target).items()}
    runs = contest(bench, "(f) autoregressive steps", contenders, [[r] for r in requests], tokens)
    steps = {name: sum(t.decode_s for t in timed) / max(1, sum(t.forwards for t in timed)) for name, timed in runs.items()}
    least = weights / peak
    element = 1 if head.int8 else target.dtype.itemsize
    least_draft = step_bytes(head.head, element) / peak
    c = over([k.c["head"] * k.t_ar_s / least_draft for k in costs], at_most=C_TIMES)
    fastest = min(steps.values())
    profiled: dict[str, tuple[Drafter, int]] = {"none": (NoDrafter(), 1), "head": (head, 4), **drafters}
    return {
        "bandwidth_gb_s": peak / 1e9, "weights_gb": weights / 1e9, "target": target.name, "step_ms": {name: 1e3 * s for name, s in steps.items()},
        "ar_share": {"value": least / fastest, "wanted": f">= {AR_SHARE}", "met": least / fastest >= AR_SHARE},
        "graphed_against_eager": ratio(speed(runs["graphed"]), speed(runs["eager"])) if "graphed" in runs else None,
        "verify_cost": verify_costs(costs, {8: V8}), "draft_step_over_roofline": c,
        "host_copies": {name: host_copies(bench, drafter, gamma, requests[0]) for name, (drafter, gamma) in profiled.items()},
    }


def graph_options(target: Target) -> dict[str, dict[str, Any]]:
    """Ways to run a round on this device: eager, on a GPU also as captured graphs."""
    eager = {"eager": {"graphs": False}}
    return eager | {"graphed": {"graphs": True}} if target.device.type == "cuda" else eager


def random_requests(target: Target, count: int, length: int = PROMPT) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, target.geometry.vocab_size, (count, length), generator=generator).tolist()
    return [Request(f"random-{i}", tuple(row)) for i, row in enumerate(ids)]

