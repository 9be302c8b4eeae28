"""The checkpoint folder: config.json + model.safetensors + draftheads.json, written at once or not at all.

draftheads.json (HeadMeta) says what the head belongs to: target and revision, chat template, geometry, taps, vocabulary map, recipe, data.
Loading compares all of it: a mismatch is an error, never a low acceptance. config.json is the flat layout of the engines (no tying).
Borrowed weights are not in the file: the target's embedding never, the lm_head only when the head trained its own
(`freeze_lm_head: false`); exports fill them in.

A head that was trained together with its target (train.lora) has the target's adapter beside it, adapter/ in peft's own files; draftheads.json holds
their sha256. Whoever loads the target merges it (inference/adapter.py): the head is one of the tuned target.

load_head also opens what `specdec export` wrote (draftheads.json names its layout), and folders of other tools, which have no draftheads.json:
heads/formats/ reads both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftheads.heads import build_head
from draftheads.heads.base import DraftHead
from draftheads.heads.formats import shown
from draftheads.heads.formats.detect import is_head_folder
from draftheads.heads.formats.folder import read_config
from draftheads.heads.vocab import vocab_hash
from draftheads.recipes.files import atomic_folder, existing_folder, sha256_file
from draftheads.recipes.schema import Geometry, RecipeError, read_yaml, validate

FORMAT = 1
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
META, WEIGHTS, CONFIG = "draftheads.json", "model.safetensors", "config.json"
ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter", "adapter_config.json", "adapter_model.safetensors"


class HeadMeta(BaseModel):
    """What the trainer knows; the second group is filled in by save_head from the head itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    target: str = Field(description="name, Hub id or folder of the target")
    revision: str | None = None
    template_hash: str | None = None
    recipe_hash: str | None = None
    data_hash: str | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict, description="for tools; never read by load_head")

    head: dict[str, Any] = Field(default_factory=dict, description="the recipe's head section, resolved")
    geometry: Geometry | None = None
    taps: tuple[int | str, ...] = ()
    draft_vocab_hash: str | None = None
    weights_hash: str | None = Field(None, description="sha256 of the file with the weights")
    layout: str | None = Field(None, description="of an exported folder: which of heads/formats/; None: ours")
    own: dict[str, Any] = Field(default_factory=dict, description="values of the geometry that the head has otherwise than its target")
    adapter: dict[str, str] | None = Field(None, description="the target was tuned with the head: sha256 of the files in adapter/")


@dataclass(frozen=True)
class Adapter:
    """What a head's target was tuned by: the folder, and the sha256 that its files have to have. Two with the same sha256 are the same."""

    folder: Path = field(compare=False)
    files: dict[str, str]


def adapter_of(folder: str | os.PathLike[str], meta: HeadMeta) -> Adapter | None:
    """The adapter of a checkpoint's target; None: the head is for the target as it was published. Reads nothing."""
    return None if meta.adapter is None else Adapter(existing_folder(folder) / ADAPTER, meta.adapter)


def check_adapter(adapter: Adapter) -> None:
    """RecipeError where one of its two files is missing, or is not the one that was written. Other names in draftheads.json count for nothing."""
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        path = adapter.folder / file
        if not path.is_file():
            raise RecipeError(f"no {file} in {adapter.folder}, and this head's target was tuned by it: copy the checkpoint with it")
        if sha256_file(path) != adapter.files.get(file):
            raise RecipeError(f"{path} is not the file that was written with this head (its sha256 differs): copy the checkpoint again")


def save_head(head: DraftHead, folder: str | os.PathLike[str], meta: HeadMeta, adapter: Callable[[Path], None] | None = None) -> None:
    """Write the folder atomically. The same weights and meta give the same bytes. adapter: writes the target's adapter into a folder."""
    weights = {name: t.detach().cpu().contiguous() for name, t in head.state_dict().items()}
    meta = meta.model_copy(
        update={
            "head": head.config.model_dump(mode="json"), "geometry": meta.geometry if head.own else head.geometry, "taps": tuple(head.taps),
            "draft_vocab_hash": vocab_hash(_ids(head.d2t)),
        }
    )
    with atomic_folder(folder) as part:
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        (part / WEIGHTS).chmod(0o644)  # safetensors makes it private
        meta = meta.model_copy(update={"weights_hash": sha256_file(part / WEIGHTS)})
        if adapter is not None:
            (part / ADAPTER).mkdir()
            adapter(part / ADAPTER)
            meta = meta.model_copy(update={"adapter": {p.name: sha256_file(p) for p in sorted((part / ADAPTER).iterdir())}})
        (part / CONFIG).write_text(_json(head.engine_config()))
        (part / META).write_text(_json(meta.model_dump(mode="json")))


def read_meta(folder: str | os.PathLike[str]) -> HeadMeta:
    """Only draftheads.json: cheap, for commands that must first find the target. RecipeError when it is no checkpoint folder.

    For a head of another tool: the target that its config names, or "", and no geometry."""
    folder = existing_folder(folder)
    if not (folder / META).exists() and is_head_folder(folder):
        from draftheads.heads.formats.opening import foreign_meta

        return foreign_meta(folder)
    raw = _read_json(folder / META)
    found = raw.get("format", FORMAT)
    if not isinstance(found, int):
        raise RecipeError(f"{folder / META} has format {found!r}; wanted a whole number up to {FORMAT}: it is damaged")
    if found > FORMAT:
        raise RecipeError(f"{folder / META} has format {found}, this version reads up to {FORMAT}: upgrade draftheads")
    meta: HeadMeta = validate(HeadMeta, raw, str(folder / META))
    if meta.geometry is None:
        raise RecipeError(f"{folder / META}: geometry is missing; write checkpoints with save_head")
    return meta


def run_folder(folder: Path) -> Path | None:
    """The run that a checkpoint folder lies in, known by its recipe.yaml."""
    return next((p for p in (folder.parent.parent, folder.parent) if (p / "recipe.yaml").is_file()), None)


def stored_recipe(folder: Path, meta: HeadMeta) -> dict[str, Any]:
    """The raw recipe that came with a checkpoint: in its meta, beside it, or in its run folder; {} where there is none. It may come from
    anywhere: take no permission from it."""
    stored = meta.extra.get("recipe")
    if isinstance(stored, dict):
        return dict(stored)
    place = next((p for p in (folder, run_folder(folder)) if p is not None and (p / "recipe.yaml").is_file()), None)
    return {} if place is None else read_yaml(place / "recipe.yaml")


def load_head(
    folder: str | os.PathLike[str], *, geometry: Geometry | None = None, template_hash: str | None = None
) -> tuple[DraftHead, HeadMeta]:
    """The head (borrowed weights still NaN: call `borrow`) and its meta.

    geometry, template_hash: the loaded target's; RecipeError where the checkpoint was made for another. So does any tensor that is missing,
    unknown, of another shape or dtype, or not finite, and a config.json that contradicts draftheads.json.
    """
    folder = existing_folder(folder)
    meta = read_meta(folder)
    if meta.geometry is None:
        from draftheads.heads.formats.opening import open_foreign

        return open_foreign(folder, geometry)
    if geometry is not None:
        check_geometry(meta.geometry, geometry, str(folder))
    if template_hash is not None and meta.template_hash is not None and template_hash != meta.template_hash:
        raise RecipeError(f"{folder} was trained with chat template {meta.template_hash}, the target's is {template_hash}: "
                          "use the one it was trained with: chat_template=PATH, in a command --set target.chat_template=PATH")
    if meta.layout is not None:
        from draftheads.heads.formats.opening import open_export

        return open_export(folder, meta)
    weights = _read_weights(folder / WEIGHTS)
    if "d2t" not in weights or weights["d2t"].dtype != torch.int64 or weights["d2t"].dim() != 1:
        raise RecipeError(f"{folder / WEIGHTS}: tensor d2t (int64, one dimension) is missing")
    ids_U = _ids(weights["d2t"])
    if meta.draft_vocab_hash is not None and vocab_hash(ids_U) != meta.draft_vocab_hash:
        raise RecipeError(f"{folder}: the vocabulary map d2t has not the hash {meta.draft_vocab_hash} of {META}: the files are from different runs")
    try:
        with torch.random.fork_rng(devices=[]):  # loading draws no random numbers, as far as the caller can tell
            head = build_head(meta.head, with_own(meta.geometry, meta.own), ids_U)
    except RecipeError as error:
        raise RecipeError(f"{folder}: {error}") from None
    check_weights(head.state_dict(), weights, folder / WEIGHTS)
    if meta.weights_hash is not None and sha256_file(folder / WEIGHTS) != meta.weights_hash:
        raise RecipeError(f"{folder / WEIGHTS} is not the file that was written (its sha256 differs): copy the checkpoint again")
    head.load_state_dict(weights)
    head.own = meta.own
    _check_config(head.engine_config(), _read_json(folder / CONFIG), folder / CONFIG)
    return head, meta


def check_geometry(made_for: Geometry, target: Geometry, where: str) -> None:
    """RecipeError that names every value in which the two differ."""
    ours, theirs = made_for.model_dump(), target.model_dump()
    different = [f"{k} {ours[k]} ≠ {theirs[k]}" for k in ours if ours[k] != theirs[k]]
    if different:
        raise RecipeError(f"{where} was made for another target: " + ", ".join(different))


def with_own(geometry: Geometry, own: dict[str, Any]) -> Geometry:
    """The geometry by which a head is built: its target's, with what it has otherwise."""
    found: Geometry = validate(Geometry, {**geometry.model_dump(), **own}, META)
    return found


def check_weights(expected: dict[str, Tensor], found: dict[str, Tensor], where: Path | str, by: str = "the head section") -> None:
    """RecipeError for tensors that are missing, unknown, of another shape or kind, or not finite. by: what asks for the expected ones."""
    cure = f"the tensors and {by} contradict each other: copy or download them again"
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        parts = [f"missing {shown(missing)}"] * bool(missing) + [f"unknown {shown(unknown)}"] * bool(unknown)
        raise RecipeError(f"{where}: {'; '.join(parts)}: {cure}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise RecipeError(f"{where}: {name} is {tuple(tensor.shape)}, {by} asks for {tuple(expected[name].shape)}: {cure}")
        floats = expected[name].is_floating_point()
        # fp8 and other codes are not numbers without their scales.
        if floats != (tensor.dtype in _FLOATS):
            raise RecipeError(f"{where}: {name} is {tensor.dtype}, wanted {'floating-point numbers' if floats else expected[name].dtype}: get the "
                              "head unquantised, or copy or download it again")
        if floats and not tensor.isfinite().all():
            raise RecipeError(f"{where}: {name} holds NaN or infinity: copy or download it again")
    if not torch.equal(found["t2d"], expected["t2d"]):
        raise RecipeError(f"{where}: t2d does not agree with d2t")


def _check_config(expected: dict[str, Any], found: dict[str, Any], where: Path) -> None:
    for key, value in json.loads(_json(expected)).items():
        if key != "torch_dtype" and _said(found.get(key)) != _said(value):
            raise RecipeError(f"{where}: {key} is {found.get(key)!r}, {META} says {value!r}; neither may be edited alone")


def _said(value: Any) -> Any:
    """Without what is off: an option that is younger than the checkpoint is not in its file."""
    if isinstance(value, dict):
        return {k: _said(v) for k, v in value.items() if v is not False and v is not None}
    return None if value is False else value


def _ids(d2t_U: Tensor) -> Tensor:
    return d2t_U.cpu() + torch.arange(len(d2t_U))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _read_json(path: Path) -> dict[str, Any]:
    return read_config(path, "not a draftheads checkpoint folder")


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise RecipeError(f"no {path.name} in {path.parent}: not a draftheads checkpoint folder") from None
    except (OSError, SafetensorError) as error:
        why = " ".join(str(error).split())[:300]
        raise RecipeError(f"cannot read {path} ({why}): it is damaged or cut short; copy or download it again") from None
