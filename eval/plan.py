"""`specdec plan`: what a recipe will cost, from its geometry, before anything is loaded.

    prompts ─► tokens ─► disk (features, checkpoints) ─► peak memory (distilling, training) ─► hours (rates of this machine, or given ones)

Estimates, within a factor of two or so: answers are taken to be 70 % of their limit, text to have 4 characters a token, matrix products to
run at the given or measured rate. Finished work (a distilled store) replaces the estimate by the fact.
"""

from __future__ import annotations

import json
import time
from typing import Any

from draftheads.recipes.schema import Geometry, Recipe, RecipeError

ANSWER_SHARE, CHARACTERS_PER_TOKEN, DEFAULT_PROMPT_TOKENS, DEFAULT_PROMPTS = 0.7, 4.0, 200, 100_000
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


def make_plan(
    recipe: Recipe, *, processes: int = 1, tflops: float | None = None, bandwidth: float | None = None, memory_gib: float | None = None
) -> dict[str, Any]:
    """{"tokens", "disk_gib", "memory_gib", "hours", "rates", "placement", "parameters", "assumptions"}: plain numbers, for people and machines.

    tflops, bandwidth (GB/s), memory_gib: per device; the first two are measured here where not given. What this run has measured itself (shards
    that are finished, steps that were made) counts before both. RecipeError when neither the recipe nor the target's config.json gives its geometry.
    """
    import torch

    from draftheads.eval.placement import place
    from draftheads.heads import build_head, head_config
    from draftheads.inference.sources import read_geometry

    section = recipe.target
    geometry = section.geometry or read_geometry(section.name, section.revision, section.trust_remote_code)
    size = getattr(head_config(recipe.head, geometry), "draft_vocab_size", None) or geometry.vocab_size
    ids_U = torch.arange(size)
    with torch.device("meta"):  # shapes only: a head of an 8B target would take seconds to fill
        head = build_head(recipe.head, geometry, ids_U)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    stored = sum(t.numel() * t.element_size() for t in head.state_dict().values())
    cuda = torch.cuda.is_available() or tflops is not None
    width = BYTES[recipe.target.dtype if recipe.target.dtype != "auto" else "bfloat16" if cuda else "float32"]
    if tflops is None or bandwidth is None:
        measured = measure_rates()
        tflops, bandwidth = tflops or measured[0], bandwidth or measured[1]
    tokens = count_tokens(recipe)
    sizes = {"target": target_parameters(geometry), "head_trained": trained, "draft_vocab": size}
    taps = len([t for t in recipe.data.taps or head.taps if t != "final"])
    hours = _hours(recipe, geometry, sizes, tokens, width, processes, tflops, bandwidth)
    rates = own_rates(recipe)
    if rates["distill"] and tokens["answer"]:
        hours["distill"] = round(tokens["answer"] / rates["distill"] / 3600, 4)
    if rates["train"]:
        hours["train"] = round(tokens["trained"] / rates["train"] / 3600, 4)
    made = {
        "run": str(recipe.run_dir), "target": recipe.target.name, "parameters": sizes, "tokens": tokens,
        "disk_gib": _disk(recipe, geometry, tokens, taps, stored, trained), "memory_gib": _memory(recipe, geometry, sizes, taps, width),
        "hours": hours, "rates": rates,
        "assumptions": {
            "processes": processes, "tflops_per_device": round(tflops, 3), "gb_per_s_per_device": round(bandwidth, 1), "answer_share": ANSWER_SHARE,
            "mixture of experts": "counted as if dense" if "moe" in geometry.model_type or "mixtral" in geometry.model_type else "no",
        },
    }
    return made | {"placement": place(recipe, geometry, made, taps, devices=processes, memory_gib=memory_gib)}


def own_rates(recipe: Recipe) -> dict[str, float | None]:
    """Tokens a second that this run has reached on this machine: answers, by its finished shards; training, by its last steps. None: not yet."""
    folder, seconds, answers = recipe.run_dir / "distill", 0.0, 0
    for path in folder.glob("shard-*.json"):
        try:
            receipt = json.loads(path.read_text(encoding="utf-8"))
            seconds, answers = seconds + float(receipt["seconds"]), answers + int(receipt["answer_tokens"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    trained = None
    try:
        last = (recipe.run_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        trained = float(json.loads(last)["tokens_per_s"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        pass
    return {"distill": answers / seconds if seconds else None, "train": trained or None}


def target_parameters(g: Geometry) -> int:
    """A Llama-like decoder's parameters: embeddings, attention, gated MLP, norms."""
    attention = g.hidden_size * g.head_dim * (2 * g.num_heads + 2 * g.num_kv_heads)
    layer = attention + 3 * g.hidden_size * g.intermediate_size + 2 * g.hidden_size
    return g.vocab_size * g.hidden_size * (1 if g.tie_word_embeddings else 2) + g.num_layers * layer + g.hidden_size


def count_tokens(recipe: Recipe) -> dict[str, Any]:
    """Prompts, prompt tokens, answer tokens, training tokens and steps. From the distilled store, if it is finished and answers these prompts."""
    from draftheads.data.distill import same_prompts
    from draftheads.data.features import RowStore, rows_folder

    folder = rows_folder(recipe)
    if (folder / "manifest.json").is_file() and same_prompts(recipe) is not False:
        store = RowStore.open(folder)
        rows, total = len(store), int(sum(store.lengths))
        prompt_tokens, answers, source = 0, 0, f"distilled rows in {folder}"
    else:
        rows, per_prompt, source = _prompts(recipe)
        prompt_tokens = int(rows * min(per_prompt, recipe.data.max_prompt_tokens))
        answers = int(rows * recipe.data.max_new_tokens * ANSWER_SHARE)
        total = prompt_tokens + answers
    trained = min(total, rows * recipe.train.max_len)
    steps = recipe.train.steps or max(1, round(recipe.train.epochs * trained / recipe.train.batch_tokens))
    return {"rows": rows, "prompt": prompt_tokens, "answer": answers, "all": total, "steps": steps, "trained": steps * recipe.train.batch_tokens,
            "source": source}


def _prompts(recipe: Recipe) -> tuple[int, float, str]:
    from pathlib import Path

    from draftheads.data.select import recipe_prompts

    specs = [recipe.data.prompts] if isinstance(recipe.data.prompts, str) else recipe.data.prompts
    for spec in specs:
        if spec != "builtin" and not Path(spec).exists():
            if spec.startswith(("/", "~")):
                raise RecipeError(f"{spec}: no such prompts file; mend data.prompts")
            note = f"{spec} was not read: {DEFAULT_PROMPT_TOKENS} tokens a prompt assumed"
            return recipe.data.limit or DEFAULT_PROMPTS, DEFAULT_PROMPT_TOKENS, note
    found, _ = recipe_prompts(recipe)
    mean = sum(len(c.user_text) for c in found) / len(found) / CHARACTERS_PER_TOKEN
    return len(found), mean + 30, "counted prompts, 4 characters a token, 30 tokens of template"  # roles, markers, a default system prompt


def _disk(recipe: Recipe, g: Geometry, tokens: dict[str, Any], taps: int, stored: int, trained: int) -> dict[str, float]:
    from draftheads.data.features import bytes_per_token

    features = tokens["all"] * bytes_per_token(taps, g.hidden_size, recipe.data.states) if recipe.data.features == "capture" else tokens["all"] * 5
    if recipe.data.rows is not None:  # they lie in another run
        features = 0
    # Two moments and the weights in fp32; one more copy exists while a checkpoint is being replaced.
    checkpoints = (recipe.train.keep + 1) * (stored + 8 * trained) + stored
    return _gib({"distill": features, "checkpoints": checkpoints})


def _memory(recipe: Recipe, g: Geometry, sizes: dict[str, int], taps: int, width: int) -> dict[str, float]:
    """Peak per process. train_alone: without the target's own weights, which are `target`."""
    data, train = recipe.data, recipe.train
    weights = sizes["target"] * width
    borrowed = 2 * g.vocab_size * g.hidden_size * width
    length = data.max_prompt_tokens + data.max_new_tokens + 64
    cache = data.batch_size * length * g.num_layers * 2 * g.num_kv_heads * g.head_dim * width
    logits = data.batch_size * g.vocab_size * 4 * 3
    rows = data.shard_rows * length * (taps + 1) * g.hidden_size * 4 if data.features == "capture" else 0
    # Packing makes a second copy of the linear weights before the first one goes.
    distilling = weights * (2 if width == 4 else 1) + cache + logits + rows
    steps = max(s.steps for s in train.unroll)
    tokens = max(train.micro_batch_tokens, min(train.max_len, data.max_prompt_tokens + data.max_new_tokens))  # a long row is a micro-batch alone
    activations = tokens * steps * (12 * g.hidden_size + 4 * g.intermediate_size) * 4 + tokens * (taps + 1) * g.hidden_size * 4 * 2
    chunk = train.loss_chunk * (2 * sizes["draft_vocab"]) * 4 * 3
    training = sizes["head_trained"] * 4 * 4 + borrowed + activations + chunk + (weights if data.features == "online" else 0)
    if train.lora is not None:  # the target, what its backward pass needs of every layer, and two full-vocabulary chunks with their gradients
        training += weights + tokens * g.num_layers * (8 * g.hidden_size + 4 * g.intermediate_size) * 4 + train.loss_chunk * g.vocab_size * 4 * 4
    alone = training - (weights if data.features == "online" or train.lora is not None else 0)
    return _gib({"distill": distilling, "train": training, "train_alone": alone, "target": weights})


def _hours(
    recipe: Recipe, g: Geometry, sizes: dict[str, int], tokens: dict[str, Any], width: int, processes: int, tflops: float, bandwidth: float
) -> dict[str, float]:
    flops, reading = tflops * 1e12, bandwidth * 1e9
    body = sizes["target"] - (0 if g.tie_word_embeddings else g.vocab_size * g.hidden_size)
    already = tokens["answer"] == 0
    # A decode step of a batch: reading the weights, or multiplying them, whichever is slower.
    step = max(sizes["target"] * width / reading, recipe.data.batch_size * 2 * body / flops)
    distilling = 0.0 if already else tokens["answer"] / recipe.data.batch_size * step + tokens["prompt"] * 2 * body / flops
    steps = sum(s.steps * (s.until - before) for s, before in zip(recipe.train.unroll, [0.0, *[s.until for s in recipe.train.unroll]], strict=False))
    # Forward and backward of head and draft logits at every unroll step, and the teacher's logits once.
    per_token = steps * 6 * (sizes["head_trained"] + sizes["draft_vocab"] * g.hidden_size / 3 * 2) + 2 * sizes["draft_vocab"] * g.hidden_size
    online = 2 * body if recipe.data.features == "online" else 0
    # A tuned target: its forward, its backward (for the states, not for its own weights), and the original's and its own logits.
    lora = 4 * body + 6 * g.vocab_size * g.hidden_size if recipe.train.lora is not None else 0
    training = tokens["trained"] * (per_token + online + lora) / flops / processes
    evaluated = (recipe.eval.per_category or 20) * 7 * recipe.eval.max_new_tokens
    one = max(sizes["target"] * width / reading, 2 * body / flops)
    evaluating = evaluated * one * (len(recipe.eval.drafters) + recipe.eval.transformers_fraction * 1.5 + 0.5)
    return {k: round(v / 3600, 4) for k, v in {"distill": distilling, "train": training, "eval": evaluating}.items()}


def _gib(sizes: dict[str, float]) -> dict[str, float]:
    return {k: round(v / GIB, 3) for k, v in sizes.items()}


def measure_rates() -> tuple[float, float]:
    """(TFLOP/s of matrix products, GB/s of reading a matrix) of one device here, in about a second. What training sustains, not the peak."""
    import torch

    cuda = torch.cuda.is_available()
    device, kind, size = ("cuda", torch.bfloat16, 4096) if cuda else ("cpu", torch.float32, 1024)
    a = torch.randn(size, size, device=device, dtype=kind)
    v = torch.randn(1, size, device=device, dtype=kind)
    big = torch.randn(4 * size, size, device=device, dtype=kind)

    def best(work: Any, times: int) -> float:
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return min(taken)

    work = best(lambda: a @ a, 8)
    read = best(lambda: torch.nn.functional.linear(v, big), 20)
    # A training step reaches about 60 % of a bare product.
    return 0.6 * 2 * size**3 / work / 1e12, big.numel() * big.element_size() / read / 1e9


def print_plan(made: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    for column in ("", "distill", "train", "eval"):
        table.add_column(column, justify="left" if not column else "right")
    tokens, disk, memory, hours = made["tokens"], made["disk_gib"], made["memory_gib"], made["hours"]
    table.add_row("tokens", f"{tokens['all']:,}", f"{tokens['trained']:,} in {tokens['steps']:,} steps", "")
    table.add_row("disk", f"{disk['distill']:.2f} GiB", f"{disk['checkpoints']:.2f} GiB", "")
    table.add_row("peak memory", f"{memory['distill']:.2f} GiB", f"{memory['train']:.2f} GiB", "")
    table.add_row("time", *[_clock(hours[k]) for k in ("distill", "train", "eval")])
    sizes, assumed = made["parameters"], made["assumptions"]
    console.print(Text(f"{made['target']}: {sizes['target'] / 1e6:,.0f} M parameters; head: {sizes['head_trained'] / 1e6:.1f} M trained, "
                       f"draft vocabulary {sizes['draft_vocab']:,}; run folder {made['run']}"))
    console.print(table)
    for what, name in (("states", "The target's states"), ("target", "The target")):
        found = made["placement"][what]
        console.print(Text(f"{name}: {found['choice']} ({found['why']})."))
    if own := ", ".join(f"{what} {rate:.0f} tokens/s" for what, rate in made["rates"].items() if rate):
        console.print(Text(f"As this run has measured: {own}.", style="dim"))
    console.print(Text(f"Estimates. Per device {assumed['tflops_per_device']:g} TFLOP/s and {assumed['gb_per_s_per_device']:g} GB/s, "
                       f"{assumed['processes']} training process(es); tokens: {tokens['source']}.", style="dim"))


def _clock(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 1.5 else f"{max(1, round(hours * 60))} min" if hours > 0 else "done"
