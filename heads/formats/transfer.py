"""Export and import of heads: the files, and the checks. The layouts say what a folder holds, here it is written, read again and compared.

    export   checkpoint ─► head ─► layout.export ─► folder under another name ─► read again as the engine would, built anew, its logits
             compared with the original's ─► renamed to its place; nothing is left of one that fails
    import   folder or Hub id ─► layout.read ─► head ─► checkpoint folder of ours
    (load_head opens both: opening.py)

An exported folder names no path of this machine, and nothing of the training but its hashes and figures.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftheads.heads import build_head
from draftheads.heads.base import DraftHead
from draftheads.heads.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    META,
    Adapter,
    HeadMeta,
    adapter_of,
    check_adapter,
    check_geometry,
    load_head,
    read_meta,
    save_head,
)
from draftheads.heads.formats import Files, Found, Raw, Tables, layout
from draftheads.heads.formats.compare import compare
from draftheads.heads.formats.detect import PICKLES, SAFETENSORS
from draftheads.heads.formats.folder import fetch
from draftheads.heads.formats.opening import open_export, plain, read_folder
from draftheads.heads.vocab import vocab_hash
from draftheads.recipes.files import atomic_folder, existing_folder, folder_place, sha256_file, write_json
from draftheads.recipes.schema import Geometry, RecipeError

README = "README.md"
_OURS = {CONFIG, META, README, ADAPTER, *SAFETENSORS, *PICKLES}
DTYPES = ("float32", "bfloat16", "float16")
TUNED = ("This head was trained together with its target: it is for the target with the adapter in adapter/ merged into it, not for the original. "
         "Serve what specdec export --ckpt … --target-out DIR writes, or merge the adapter with peft.")


@dataclass
class Report:
    """What was done. tensors: how many were written or read; difference: the largest of the logits, against the checkpoint's; notes: for the user."""

    folder: str
    layout: str
    target: str
    tensors: int = 0
    difference: float = 0.0
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# ---- export


def export_head(ckpt: str | os.PathLike[str], to: str, out: str | os.PathLike[str], tables: Tables, *, dtype: str | None = None,
                geometry: Geometry | None = None, whole_vocabulary: bool = False) -> Report:
    """Write the checkpoint's head for an engine. tables, geometry: the target's. dtype: of the floating tensors; None: as in the checkpoint.
    whole_vocabulary: as widened() has it.

    RecipeError where the engine cannot express this head, where a check of the written folder fails, or where `out` holds something else.
    """
    module, out = layout(to), Path(out)
    if not hasattr(module, "export"):
        raise RecipeError(f"--to {to}: no engine loads this layout, it can only be imported; decode with our own decoder (specdec generate)")
    if dtype is not None and dtype not in DTYPES:
        raise RecipeError(f"--dtype is {dtype!r}; wanted one of {', '.join(DTYPES)}")
    _check_place(out)
    if folder_place(out) == existing_folder(ckpt).resolve():
        raise RecipeError(f"{out} is the checkpoint that is read, and would be replaced: choose another --out")
    head, meta = load_head(ckpt, geometry=geometry)
    notes = []
    if whole_vocabulary and head.config.type in module.TAKES and len(head.d2t) < head.geometry.vocab_size:
        head, meta = widened(head), meta.model_copy(update={"metrics": {}})
        notes = ["Over the whole vocabulary, trained over a reduced one: it drafts other tokens than the checkpoint. Measure this folder."]
    kind = getattr(torch, dtype or stored_dtype(Path(ckpt)))
    head, tables = rounded(head, tables, kind)
    meta = meta.model_copy(update={"target": public_name(meta.target), "extra": {}, "layout": to})
    if not meta.target:
        meta = meta.model_copy(update={"revision": None})
    files: Files = module.export(head, meta, tables)
    adapter = adapter_of(ckpt, meta)
    files.notes += notes
    if adapter is not None:
        check_adapter(adapter)
        files.notes[:0] = [TUNED]
    with atomic_folder(out) as part:
        if adapter is not None:
            (part / ADAPTER).mkdir()
            copy_adapter(adapter, part / ADAPTER)
        written = write(part, files, head, meta, kind, getattr(module, "WEIGHTS", SAFETENSORS[0]))
        again, _ = open_export(part, written, allow_pickle=True)
        difference = compare(head, again, tables)
    return Report(str(out), to, meta.target, len(files.tensors), difference, files.notes)


def widened(head: DraftHead) -> DraftHead:
    """The head over the target's whole vocabulary: what it computes before the target's lm_head, which it borrows, knows no vocabulary. So one may be
    trained over a reduced vocabulary, which makes a step several times cheaper, and served where an engine wants the whole. It drafts other tokens
    then: judge the exported folder. RecipeError for a head with weights of its own for the tokens of its vocabulary."""
    if len(head.d2t) == head.geometry.vocab_size:
        return head
    maps = ("d2t", "t2d")
    section = head.config.model_dump(mode="json") | {"draft_vocab_size": None}
    with torch.random.fork_rng(devices=[]):
        wide = build_head(section, head.geometry)
    state, wanted = head.state_dict(), wide.state_dict()
    own = [n for n in state if n not in maps and (n not in wanted or wanted[n].shape != state[n].shape)]
    if own:
        raise RecipeError(f"--whole-vocabulary: the head has trained {own[0]} for the {len(head.d2t)} tokens of its draft vocabulary; train with "
                          "head.freeze_lm_head: true")
    wide.load_state_dict(state | {n: wanted[n] for n in maps})
    wide.own = head.own
    return wide


def copy_adapter(adapter: Adapter, folder: Path) -> None:
    """Its two files, into a folder that is there."""
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        shutil.copyfile(adapter.folder / file, folder / file)


def write(folder: Path, files: Files, head: DraftHead, meta: HeadMeta, kind: torch.dtype, name: str) -> HeadMeta:
    """All files of an export into a folder. -> its meta"""
    tensors = {n: (t.to(kind) if t.is_floating_point() else t).detach().cpu().clone().contiguous() for n, t in files.tensors.items()}
    if name in PICKLES:
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / name).chmod(0o644)  # safetensors makes it private
    config = files.config | {"torch_dtype": str(kind).removeprefix("torch.")}
    if isinstance(config.get("transformer_layer_config"), dict):
        config["transformer_layer_config"] = config["transformer_layer_config"] | {"torch_dtype": config["torch_dtype"]}
    write_json(folder / CONFIG, config)
    found: Found = layout(str(meta.layout)).read(Raw("the exported head", config, tensors), meta.geometry, True)
    meta = meta.model_copy(
        update={
            "head": head.config.model_dump(mode="json") | plain(found.section), "taps": tuple(head.taps),
            "draft_vocab_hash": vocab_hash(head.target_ids_U()), "weights_hash": sha256_file(folder / name),
        }
    )
    write_json(folder / META, meta.model_dump(mode="json"))
    lines = [f"# Draft head ({head.config.type}) for {meta.target or 'a local target'}", "", f"Layout: {meta.layout}. How to use it:", ""]
    (folder / README).write_text("\n".join([*lines, *(f"    {note}" for note in files.notes), ""]), encoding="utf-8")
    return meta


def rounded(head: DraftHead, tables: Tables, kind: torch.dtype) -> tuple[DraftHead, Tables]:
    """The head, and the lm_head that it borrows, with numbers that a file of this dtype holds exactly, in float32."""
    state = {n: (t.to(kind).float() if t.is_floating_point() else t) for n, t in head.state_dict().items()}
    head.load_state_dict(state)
    tables = Tables(tables.embed_VD.to(kind).float(), tables.lm_head_VD.to(kind).float())
    head.borrow(tables.embed_VD, tables.lm_head_VD)
    return head.eval().requires_grad_(False), tables


def stored_dtype(folder: Path) -> str:
    """Of the floating tensors in a checkpoint."""
    name = next((n for n in SAFETENSORS if (folder / n).is_file()), None)
    if name is None:
        return DTYPES[0]
    with safe_open(folder / name, "pt") as file:
        kinds = {file.get_slice(n).get_dtype() for n in file.keys()}
    return "float32" if "F32" in kinds else "bfloat16" if "BF16" in kinds else "float16" if "F16" in kinds else "float32"


def public_name(target: str) -> str:
    """A named target or a Hub id; "" for a path, which means nothing elsewhere."""
    local = target.startswith((".", "/", "~")) or target.endswith(".gguf") or target.count("/") > 1 or "\\" in target
    return "" if local or Path(target).exists() else target


# ---- import


def import_head(source: str, out: str | os.PathLike[str], target: str, geometry: Geometry, *, from_: str = "auto", revision: str | None = None,
                source_revision: str | None = None, allow_pickle: bool = False) -> Report:
    """A published head (folder or Hub id) as a checkpoint of ours, for a target of this geometry.

    RecipeError: a head for another target, a damaged file, a pickle that was not allowed, a config that contradicts the tensors, unknown tensors.
    """
    out = Path(out)
    _check_place(out)
    folder = fetch(source, source_revision, allow_pickle=allow_pickle)
    if (folder / META).is_file():
        return _import_pickle(folder, out, target, revision, geometry, public_name(source), allow_pickle)
    head, found, name = read_folder(folder, from_, geometry, allow_pickle)
    extra = {"imported": {"layout": name, "source": public_name(source), "facts": found.facts}}
    kinds = {t.dtype for t in found.tensors.values() if t.is_floating_point()}
    if len(kinds) == 1:
        head = head.to(kinds.pop())
    save_head(head, out, HeadMeta(target=target, revision=revision, geometry=geometry, own=found.own, extra=extra))
    load_head(out, geometry=geometry)
    return Report(str(out), name, target, len(found.tensors), 0.0, found.facts)


def _import_pickle(folder: Path, out: Path, target: str, revision: str | None, geometry: Geometry, source: str, allow_pickle: bool) -> Report:
    """A folder that export wrote as a pickle, which nothing else opens. RecipeError for one that can be used as it is."""
    meta = read_meta(folder)
    if meta.layout is None or meta.geometry is None or getattr(layout(meta.layout, "the layout"), "WEIGHTS", None) not in PICKLES:
        raise RecipeError(f"{folder} has a {META}: it is ours already, use it as it is (specdec-eval --ckpt {folder})")
    check_geometry(meta.geometry, geometry, str(folder))
    if folder_place(out) == folder.resolve():
        raise RecipeError(f"{out} is the folder that is read, and would be replaced: choose another --out")
    head, _ = open_export(folder, meta, allow_pickle=allow_pickle)
    adapter, name = adapter_of(folder, meta), meta.layout
    if adapter is not None:
        check_adapter(adapter)
    meta = meta.model_copy(update={"target": target, "revision": revision, "layout": None,
                                   "extra": {"imported": {"layout": name, "source": source, "facts": []}}})
    save_head(head, out, meta, None if adapter is None else partial(copy_adapter, adapter))
    load_head(out, geometry=geometry)
    return Report(str(out), name, target, len(head.state_dict()))


def _check_place(out: Path) -> None:
    """Only what export or import wrote is ever replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise RecipeError(f"{out} is a file: choose another --out")
    foreign = sorted(p.name for p in out.iterdir() if p.name not in _OURS)
    try:
        meta = None if foreign else read_meta(out)
    except RecipeError:
        meta = None
    if meta is None or (meta.layout is None and "imported" not in meta.extra):
        what = f"holds {foreign[0]}, which" if foreign else "is a folder that"
        raise RecipeError(f"{out} {what} no export wrote: choose another --out, or remove it")
