"""The two commands, `specdec` and `specdec-eval`. Only typer is imported here: torch and transformers wait until a command runs.

Exit codes: 0 well, 1 the evaluation found a fault (or a bug of ours: its traceback is in a file whose path is printed), 2 bad input, one
line that says what to mend, 130 interrupted, 143 stopped by SIGTERM, 141 nobody reads the output any more (`| head`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from draftheads.eval.cli_formats import export_head, import_head
from draftheads.eval.cli_generate import CkptOption, DeviceOption, JsonOption, SetOption, from_here, generate, here, tree
from draftheads.inference.checkpoints import find_folder
from draftheads.inference.shapes import parse_shape
from draftheads.recipes.files import blocked
from draftheads.recipes.schema import RecipeError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Train, measure and use draft heads for speculative decoding.\n\n"
    "A run, in order: `specdec plan` → `distill` → `show-mask` → `train` → `eval` → `generate`. The first four take the same recipe, the last "
    "two the run folder (`--ckpt`), which names all they need; `tree` searches a draft tree for them, `export` and `import` write and read heads "
    "in the layouts of engines. `distill`, `train` and `eval`, when "
    "stopped, go on where they were if you run the same command again.",
)
eval_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

RecipeOption = Annotated[Path, typer.Option("--recipe", "-r", help="Recipe (YAML).")]


def main() -> None:
    """`specdec`."""
    sys.exit(guard("specdec", lambda: app(standalone_mode=False, prog_name="specdec")))


def main_eval() -> None:
    """`specdec-eval`, the same as `specdec eval`."""
    sys.exit(guard("specdec-eval", lambda: eval_app(standalone_mode=False, prog_name="specdec-eval")))


def guard(name: str, command: Callable[[], Any]) -> int:
    """Run a command; turn every way of failing into one line on stderr and an exit code."""
    try:
        with _sigterm_unwinds():
            result = command()
            sys.stdout.flush()
    except BrokenPipeError:
        return _reader_left()
    except RecipeError as error:
        return _say(name, f"error: {_one_line(str(error))}", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _say(name, "interrupted; run the same command again to go on", 130)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # click and rich turn it into an exit with 1, which would say: a fault was found
            return _reader_left()
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        if (line := blocked(error)) is not None:
            return _say(name, f"error: {_one_line(line)}", 2)
        usage = getattr(error, "format_message", None)  # click's own errors, whichever click typer brings along
        if usage is not None:
            return _say(name, f"error: {_one_line(usage())} See {name} --help.", 2)
        with tempfile.NamedTemporaryFile("w", prefix=f"{name}-", suffix=".log", delete=False, encoding="utf-8") as log:
            traceback.print_exc(file=log)
        return _say(name, f"unexpected {type(error).__name__}: {_one_line(str(error))[:300]}; the traceback is in {log.name}", 1)
    return result if isinstance(result, int) else 0


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM as SystemExit(143), so that what is half-written is removed. The second one kills."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def unwind(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _reader_left() -> int:
    """`… | head` has read enough. What is still buffered goes nowhere, or the interpreter would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _say(name: str, text: str, code: int) -> int:
    print(f"{name}: {text}", file=sys.stderr, flush=True)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _load(recipe: Path, overrides: list[str]) -> Any:
    from draftheads.recipes.schema import Recipe

    return Recipe.load(recipe, overrides)


EVAL_HELP = """Measure a draft head: paired, interleaved runs; acceptance; speed-up with intervals; is the output the target's own?

The checkpoint names its target and its evaluation settings; nothing else is needed:

    specdec-eval --ckpt runs/smollm2-135m

Other prompts, fewer of them, a given draft length:

    specdec-eval --ckpt runs/smollm2-135m --prompts mine.jsonl --per-category 3 --gamma 4

At temperature 0.7 with batches of 8 (losslessness is then judged by a z-score):

    specdec-eval --ckpt runs/smollm2-135m --temperature 0.7 --batch-size 8 --out runs/t07

Other drafters, and trees instead of chains (head, draft_model and mtp grow them, suffix dynamic ones; ngram ignores them):

    specdec-eval --ckpt runs/smollm2-135m --drafters none,suffix,head,composite --copy-first suffix --out runs/suffix

    specdec-eval --ckpt runs/smollm2-135m --tree dynamic:depth=4,top_k=4,nodes=12 --out runs/tree

    specdec-eval --ckpt runs/llama8b --draft-model meta-llama/Llama-3.2-1B-Instruct --out runs/llama8b/model

Further options of the recipe's eval section by --set, e.g. `--set eval.repetition_penalty=1.1 --set eval.min_p=0.05`.
With `--lossy typical` the report is stamped: what is sampled then is not a draw from the target.

Writes report.html, report.md, report.json. Ends with 1 if an output differs from the target's without a numerical tie to explain it, or
if the speed-up is larger than τ allows.
"""


@eval_app.command(help=EVAL_HELP)
@app.command("eval", help=EVAL_HELP)
def eval_command(
    ckpt: CkptOption,
    prompts: Annotated[list[str], typer.Option("--prompts", help="'builtin', or a JSONL/Parquet file; may be repeated.")] = [],  # noqa: B006
    per_category: Annotated[int | None, typer.Option(help="Prompts per category.")] = None,
    categories: Annotated[str | None, typer.Option(help="Only these categories, separated by commas.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens per answer.")] = None,
    gamma: Annotated[str | None, typer.Option(help="Draft length of the timed runs, or 'auto': chosen from measured costs.")] = None,
    drafters: Annotated[str | None, typer.Option(help="Of none, ngram, suffix, head, composite, draft_model, mtp; separated by commas.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Hub id, folder or name of a smaller model: drafter draft_model.")] = None,
    copy_first: Annotated[str | None, typer.Option(help="What copies in drafter composite: ngram or suffix.")] = None,
    tree: Annotated[str | None, typer.Option(help="`dynamic:depth=4,top_k=4,nodes=12`, `static:FILE.json`, `sampled:3,2,1`; or `chain`.")] = None,
    lossy: Annotated[str | None, typer.Option(help="`typical`: Medusa's lossy acceptance; stamps the report.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts decoded together.")] = None,
    transformers: Annotated[float | None, typer.Option("--transformers", help="Share of the prompts that transformers' generate runs too.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's own choice.")] = None,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report; default: report/ of the run (--quick: report-quick/).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One prompt per category, 32 tokens: a look, not a result.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if this evaluation is (partly) done.")] = False,
    overrides: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    given: dict[str, Any] = {"per_category": 1, "max_new_tokens": 32, "bootstrap": 500} if quick else {}
    given |= {
        "prompts": [from_here(p) for p in prompts] or None, "categories": _split(categories), "gamma": _gamma(gamma),
        "drafters": _split(drafters), "temperature": temperature, "batch_size": batch_size, "transformers_fraction": transformers,
        "draft_model": None if draft_model is None else here(draft_model), "copy_first": copy_first, "lossy": lossy,
        "tree": None if tree is None else _tree_from_here(tree),
        "per_category": given.get("per_category") if per_category is None else per_category,
        "max_new_tokens": given.get("max_new_tokens") if max_new_tokens is None else max_new_tokens,
    }
    _positive(threads, "--threads")
    find_folder(ckpt.expanduser())  # before the long imports
    from draftheads.eval.subject import open_checkpoint

    checkpoint = open_checkpoint(ckpt, overrides, {k: v for k, v in given.items() if v is not None})
    from draftheads.eval.run import evaluate, silence

    silence()
    if quick and out is None:  # a look must not take the place of a result
        out = (checkpoint.run or checkpoint.folder) / "report-quick"
    outcome = evaluate(checkpoint, out=out, threads=threads, device=device, fresh=fresh, quiet=as_json)
    if as_json:
        print(json.dumps(outcome.report, ensure_ascii=False, indent=2))
    else:
        from draftheads.eval.report.terminal import print_report

        print_report(outcome.report, outcome.folder)
    if not outcome.report["ok"]:
        raise typer.Exit(1)


def _split(value: str | None) -> list[str] | None:
    return None if value is None else [v.strip() for v in value.split(",") if v.strip()]


def _gamma(value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise RecipeError(f"--gamma is {value!r}; wanted a whole number, or 'auto'") from None


def _positive(value: int | None, name: str) -> None:
    if value is not None and value < 1:
        raise RecipeError(f"{name} is {value}; it must be at least 1")


def _tree_from_here(text: str) -> str:
    """Read once, so that a mistake is found before the long imports."""
    parse_shape(text)
    kind, _, file = text.partition(":")
    return f"static:{Path(file).expanduser().absolute()}" if file.endswith(".json") else text


@app.command()
def plan(
    recipe: RecipeOption,
    overrides: SetOption = [],  # noqa: B006
    processes: Annotated[int, typer.Option("--processes", "--gpus", help="Training processes (one per GPU).", min=1)] = 1,
    gpu_memory: Annotated[float | None, typer.Option(help="GB of memory that one GPU has: then it says what fits, and how.", min=0.1)] = None,
    tflops: Annotated[float | None, typer.Option(help="What one device sustains in matrix products; default: measured here in a second.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s that one device reads weights with; default: measured here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What a recipe will cost before it starts: tokens, disk, peak memory, hours. Loads no model.

        specdec plan --recipe recipes/smollm2-135m.yaml

    For a machine that you are not sitting at, say what it sustains (an H100: about 400 TFLOP/s in bf16, 2500 GB/s):

        specdec plan --recipe recipes/llama8b.yaml --gpus 8 --gpu-memory 80 --tflops 400 --bandwidth 2500

    It also says where it would put things, and why: the target's states on disk (data.features: capture) or computed again in training (online),
    the target whole on every GPU or spread over them. Rates that this run has measured itself replace the estimates.
    """
    loaded = _load(recipe, overrides)
    from draftheads.eval.plan import make_plan, print_plan

    made = make_plan(loaded, processes=processes, tflops=tflops, bandwidth=bandwidth, memory_gib=gpu_memory)
    print(json.dumps(made, indent=2)) if as_json else print_plan(made)


@app.command()
def distill(
    recipe: RecipeOption,
    overrides: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Let the target answer the prompts: its own tokens, and (features: capture) its states, shard by shard. Run again to go on.

        specdec distill --recipe recipes/smollm2-135m.yaml

        specdec distill --recipe recipes/smollm2-135m.yaml --set data.limit=100 --set data.max_new_tokens=64
    """
    loaded = _load(recipe, overrides)
    from draftheads.data.distill import distill as run
    from draftheads.eval.run import silence

    silence()
    store = run(loaded, progress=not as_json)
    found = {"folder": str(store.folder), "rows": len(store), "hash": store.hash, "counts": store.counts}
    print(json.dumps(found, indent=2, default=str) if as_json else f"{len(store)} rows in {found['folder']}")


@app.command("show-mask")
def show_mask(
    recipe: RecipeOption,
    overrides: SetOption = [],  # noqa: B006
    rows: Annotated[int, typer.Option(help="How many rows to show.", min=1)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Show which tokens training will supervise: answers in colour, prompts plain. From the distilled rows, or (before distilling) from
    conversations of the data that already hold answers.

        specdec show-mask --recipe recipes/smollm2-135m.yaml --rows 1
    """
    loaded = _load(recipe, overrides)
    from draftheads.data.show_mask import masked_rows, print_masks
    from draftheads.eval.run import silence

    silence()
    found = masked_rows(loaded, rows)
    print(json.dumps(found, ensure_ascii=False, indent=2)) if as_json else print_masks(found)


@app.command()
def train(
    recipe: RecipeOption,
    overrides: SetOption = [],  # noqa: B006
    processes: Annotated[int, typer.Option(help="Processes (one per GPU).", min=1)] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """Start training by accelerate's launcher, and print the command it starts.

        specdec train --recipe recipes/smollm2-135m.yaml

    For several machines, or your own accelerate configuration, use that command with your options.
    """
    from draftheads.eval.launch import run_launcher, training_command

    _load(recipe, overrides)
    import shlex

    import torch

    command = training_command(recipe, overrides, processes, cuda=torch.cuda.is_available())

    print(shlex.join(command), file=sys.stderr, flush=True)
    if not dry_run:
        raise typer.Exit(run_launcher(command))


# The commands of the decoder, and of layouts, are in files of their own.
app.command("generate")(generate)
app.command("tree")(tree)
app.command("export")(export_head)
app.command("import")(import_head)


if __name__ == "__main__":
    main()
