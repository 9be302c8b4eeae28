"""`specdec export` and `specdec import`: heads in the layouts of engines. As in cli.py, torch waits until a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from draftheads.eval.cli_generate import CkptOption, JsonOption, here
from draftheads.heads.formats import FORMATS, layout_name
from draftheads.inference.checkpoints import find_folder
from draftheads.recipes.files import folder_place
from draftheads.recipes.schema import RecipeError

DTYPES = ("float32", "bfloat16", "float16")


def export_head(
    ckpt: CkptOption,
    to: Annotated[str | None, typer.Option("--to", help="vllm, sglang, trtllm, speculators, eagle, medusa; medusa_pt: the same as a "
                                                        "pickle.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: export/LAYOUT of the run, or beside the checkpoint.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as in the checkpoint, for the target as in the "
                                                   "recipe.")] = None,
    target: Annotated[str | None, typer.Option(help="The target, where the place that the checkpoint names is no longer right.")] = None,
    target_out: Annotated[Path | None, typer.Option("--target-out", help="Also (without --to: only) write the target, as an ordinary transformers "
                                                                         "folder; tuned, where the head was trained with train.lora.")] = None,
    whole_vocabulary: Annotated[bool, typer.Option("--whole-vocabulary", help="A head that was trained over a reduced draft vocabulary and shares "
                                                                              "the target's lm_head (head.freeze_lm_head), over the whole one: "
                                                                              "for layouts without a draft vocabulary.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="The target brings its own code.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a head as an engine loads it, unmodified; read it again as the engine would and compare its logits before anything is kept.

        specdec export --ckpt runs/smollm2-135m --to vllm

        specdec export --ckpt runs/llama8b --to sglang --dtype bfloat16 --out exports/llama8b-sglang

        specdec export --ckpt runs/smollm2-135m-medusa2 --to vllm --whole-vocabulary --target-out exports/smollm2-135m-tuned

        specdec-eval --ckpt exports/llama8b-sglang

    The folder holds config.json, the weights (with the rows of the target's lm_head where an engine needs them), draftheads.json and a README with
    the engine's command. It names no path of this machine. What the engine cannot express is an error that says what to do instead.

    Of the target only the embedding and the lm_head are read, where its files let them be read alone. A head that was trained with train.lora wants
    the tuned target: --target-out writes it.
    """
    if to is None and target_out is None:
        raise RecipeError("nothing to write: say --to LAYOUT for the head, --target-out DIR for the target, or both")
    if to is None and whole_vocabulary:
        raise RecipeError("--whole-vocabulary is about the head, and without --to LAYOUT none is written")
    if to is None and out is not None:
        raise RecipeError("--out is where the head goes, and without --to LAYOUT none is written; the target goes to --target-out")
    if to is not None:
        layout_name(to, "--to")
    if dtype is not None and dtype not in DTYPES:
        raise RecipeError(f"--dtype is {dtype!r}; wanted one of {', '.join(DTYPES)}")
    folder = find_folder(ckpt.expanduser())
    from draftheads.eval.run import silence
    from draftheads.eval.subject import open_checkpoint
    from draftheads.heads.formats.transfer import Tables, public_name
    from draftheads.heads.formats.transfer import export_head as export
    from draftheads.inference.saving import check_target_place, save_target
    from draftheads.inference.sources import locate
    from draftheads.inference.tables import read_tables
    from draftheads.inference.target import load_target

    silence()
    checkpoint = open_checkpoint(ckpt, ([] if target is None else [f"target.name={json.dumps(here(target))}"])
                                 + (["target.trust_remote_code=true"] if trust_remote_code else []))
    report, lines, section, loaded = {}, [], checkpoint.recipe.target, None
    goal = out or (checkpoint.run / "export" / (to or "") if checkpoint.run is not None else folder.with_name(f"{folder.name}-{to}"))
    if to is not None:  # before the long work
        _apart(folder_place(goal := goal.expanduser()), target_out)
    if target_out is not None:
        source = locate(section.name, section.revision)
        check_target_place(target_out := target_out.expanduser(), source.path if source.local else None)
        asked = section if dtype is None else section.model_copy(update={"dtype": dtype})
        loaded = load_target(asked, checkpoint.adapter, device="cpu", packed=False)
    if to is not None:
        found = None if loaded is not None else read_tables(section.name, revision=section.revision, dtype=section.dtype,
                                                            trust_remote_code=section.trust_remote_code, geometry=section.geometry)
        if found is None:
            loaded = loaded or load_target(section, checkpoint.adapter, device="cpu")
            found = loaded.embed_VD, loaded.lm_head_VD, loaded.geometry
        made = export(folder, to, goal, Tables(found[0], found[1]), dtype=dtype, geometry=found[2], whole_vocabulary=whole_vocabulary)
        report = made.as_json()
        lines.append(f"wrote {goal}: {made.tensors} tensors, read back with the same logits (difference {made.difference:.0e})")
    if target_out is not None and loaded is not None:
        save_target(loaded.model, loaded.tokenizer, target_out, target=public_name(loaded.name), adapter=loaded.adapter)
        report["target_folder"] = str(target_out)
        lines.append(f"wrote {target_out}: the target, {'tuned' if loaded.adapter is not None else 'as it is'}, "
                     f"{str(loaded.dtype).removeprefix('torch.')}")
    _say({"notes": []} | report, as_json, "\n".join(lines))


def import_head(
    ckpt: Annotated[str, typer.Option("--ckpt", help="Folder of the published head, or its Hub id.")],
    target: Annotated[str, typer.Option(help="The target that it was trained for: Hub id, folder or named target.")],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write.")],
    from_: Annotated[str, typer.Option("--from", help="auto (by config and tensor names), or a layout: " + ", ".join(FORMATS) + ".")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Of the head's repository.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Of the target's repository.")] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read .bin and .pt files (by torch's restricted reader).")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="The target brings its own code.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a published head (EAGLE-1/2/3, P-EAGLE, DFlash, DSpark, Medusa, Hydra; of SpecForge, speculators and others) and write it as a checkpoint
    of ours, which names the target as it was given here.

        specdec import --ckpt yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct --out heads/eagle3 --allow-pickle

        specdec-eval --ckpt heads/eagle3

    Of the target only the config is read here. A head for another target, a damaged file, a config that contradicts the tensors and unknown tensors
    are errors; what was assumed is said.
    """
    if from_ != "auto":
        layout_name(from_, "--from")
    from draftheads.eval.run import silence
    from draftheads.heads.formats.transfer import import_head as read
    from draftheads.inference.sources import read_geometry

    silence()
    folder_place(out := out.expanduser())
    name = here(target)
    geometry = read_geometry(name, target_revision, trust_remote_code)
    report = read(ckpt, out, name, geometry, from_=from_, revision=target_revision, source_revision=revision,
                  allow_pickle=allow_pickle)
    _say(report.as_json(), as_json, f"wrote {out}: {report.tensors} tensors, read as {report.layout}; measure it: specdec-eval --ckpt {out}")


def _apart(head: Path, target_out: Path | None) -> None:
    """RecipeError where one of the two folders is the other, or lies in it: the one that is written last would replace, or refuse, the first."""
    target = None if target_out is None else folder_place(target_out.expanduser())
    if target is not None and (head.is_relative_to(target) or target.is_relative_to(head)):
        raise RecipeError(f"the head goes to {head} and the target to {target}: give them two folders beside each other (--out, --target-out)")


def _say(report: dict[str, Any], as_json: bool, line: str) -> None:
    if as_json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
        return
    print(line)
    for note in report["notes"]:
        print(f"  {note}")
