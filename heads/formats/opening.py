"""Opening heads in a layout of an engine: what export wrote (draftheads.json names the layout), and what others published. For load_head.

An exported folder is read as its engine reads it, and held against draftheads.json: neither may be edited alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draftheads.heads import build_head
from draftheads.heads.base import DraftHead
from draftheads.heads.checkpoint import CONFIG, META, HeadMeta, check_weights, with_own
from draftheads.heads.formats import Found, layout, shown
from draftheads.heads.formats.detect import SAFETENSORS, detect, tensor_names
from draftheads.heads.formats.folder import read_config, read_raw
from draftheads.heads.vocab import vocab_hash
from draftheads.recipes.files import sha256_file
from draftheads.recipes.schema import Geometry, RecipeError


def open_export(folder: Path, meta: HeadMeta, *, allow_pickle: bool = False) -> tuple[DraftHead, HeadMeta]:
    """The head of an exported folder, read as the engine reads it and checked against draftheads.json. For load_head."""
    assert meta.layout is not None and meta.geometry is not None
    module = layout(meta.layout, "the layout")
    weights = folder / getattr(module, "WEIGHTS", SAFETENSORS[0])
    raw = read_raw(folder, allow_pickle=allow_pickle, name=weights.name)
    with readable(str(folder)):
        found: Found = module.read(raw, meta.geometry, True)
    if found.own != meta.own:
        raise RecipeError(f"{folder}: {CONFIG} gives the head {found.own or 'the same rotary positions and epsilon as its target'}, {META} says "
                          f"{meta.own or 'those of the target'}: neither may be edited alone")
    section = plain(found.section)
    for key, value in section.items():
        if value is not None and meta.head.get(key, False) != value:  # absent: younger than the folder, and off
            raise RecipeError(f"{folder}: {key} is {value!r} by its config and tensors, {META} says {meta.head.get(key)!r}; neither may be "
                              "edited alone")
    if list(meta.taps) != list(meta.head.get("taps", ())):
        raise RecipeError(f"{folder / META}: taps {list(meta.taps)} and head.taps {meta.head.get('taps')} disagree")
    head = build(Found(meta.head, found.tensors, found.draft_ids, found.own, found.facts), meta.geometry, str(folder))
    if meta.draft_vocab_hash is not None and vocab_hash(head.target_ids_U()) != meta.draft_vocab_hash:
        raise RecipeError(f"{folder}: the draft vocabulary has not the hash {meta.draft_vocab_hash} of {META}: the files are from different exports")
    if meta.weights_hash is not None and sha256_file(weights) != meta.weights_hash:
        raise RecipeError(f"{weights} is not the file that was written (its sha256 differs): copy it again")
    return head, meta


def foreign_meta(folder: Path) -> HeadMeta:
    """For read_meta: what a published folder says of its target, which may be nothing. It has no geometry: the target's is to be given."""
    config = read_config(folder / CONFIG)
    with readable(str(folder)):
        found = detect(config, tensor_names(folder))
        if found is None:
            raise RecipeError(f"no {META} in {folder}, and no draft head that is known here: give a checkpoint folder")
        target_of = getattr(layout(found, "the layout"), "target_of", lambda config: None)
        return HeadMeta(target=target_of(config) or "", extra={"foreign": found})


def open_foreign(folder: Path, geometry: Geometry | None, *, allow_pickle: bool = False) -> tuple[DraftHead, HeadMeta]:
    """The head of a published folder, for a target of this geometry. For load_head."""
    if geometry is None:
        raise RecipeError(f"{folder} has no {META}, so its target must be given: specdec import --ckpt {folder} --target NAME --out DIR")
    head, found, name = read_folder(folder, "auto", geometry, allow_pickle)
    meta = foreign_meta(folder)
    return head, meta.model_copy(update={"head": head.config.model_dump(mode="json"), "geometry": geometry, "taps": tuple(head.taps),
                                         "own": found.own, "extra": {"foreign": name, "facts": found.facts},
                                         "draft_vocab_hash": vocab_hash(head.target_ids_U())})


def build(found: Found, geometry: Geometry, where: str) -> DraftHead:
    """A head of this section with these tensors. RecipeError for any tensor too many, too few or of another shape."""
    kind = found.section.get("type")
    try:
        with readable(where), torch.random.fork_rng(devices=[]):
            head = build_head(found.section, with_own(geometry, found.own), found.draft_ids)
    except RecipeError as error:
        raise RecipeError(str(error) if where in str(error) else f"{where}: {error}") from None
    check_weights(head.state_dict(), found.tensors, where, f"{CONFIG} of this {kind} head")
    head.load_state_dict(found.tensors)
    head.own = dict(found.own)
    return head


def read_folder(folder: Path, from_: str, geometry: Geometry, allow_pickle: bool) -> tuple[DraftHead, Found, str]:
    module = None if from_ == "auto" else layout(from_, "--from")
    raw = read_raw(folder, allow_pickle=allow_pickle)
    with readable(str(folder)):
        seen = detect(raw.config, raw.tensors)
    name = seen if module is None else from_
    if name is None:
        raise RecipeError(f"{folder}: config.json and tensors ({shown(sorted(raw.tensors))}) are of no draft head that is known here; "
                          "name its layout with --from")
    with readable(str(folder)):
        found: Found = layout(name, "--from").read(raw, geometry)
    return build(found, geometry, str(folder)), found, name


@contextmanager
def readable(where: str) -> Iterator[None]:
    """A config may hold anything: what trips over it is bad input."""
    try:
        yield
    except RecipeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RecipeError(f"{where}: config.json or the tensors are not as this layout has them ({why}): copy or download it again") from None


def plain(section: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(section))
    return found
