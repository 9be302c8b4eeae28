"""The row store: what distillation leaves and training reads. Token-exact rows, and the target's states if they were captured.

    rows ─► write_shard ─► shard-00000.{safetensors,jsonl} ─► shard-00000.json (the receipt, written last)
    all receipts ─► write_manifest ─► manifest.json ─► RowStore.open ─► store[i] ─► Row

A shard holds its rows end to end. Activations of real targets reach 25,000 in a few channels, so states are stored as small numbers with
what to multiply them by: fp16 of unit rms, or half as large as fp8 or int8 (data.states). The log-sum-exp stays fp32. Files are
memory-mapped: opening costs the manifest and the lengths, a row costs its own bytes.

Shape suffixes: R rows, L tokens of a row, T = L − 1 slots of a row (the last token was never fed), S slots of a shard, K taps,
D hidden, F = K · D feature width.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftheads.recipes.files import atomic_path, sha256_file, write_json
from draftheads.recipes.schema import Recipe, RecipeError, content_hash

FORMAT = 1
MAX_OPEN_SHARDS = 64
CURE = "run specdec distill again to regenerate this shard"


class ShardError(RecipeError):
    """A shard is missing, truncated or altered. Running `specdec distill` again regenerates it."""


@dataclass
class Row:
    """One document: a prompt as it was sent and one answer as it was produced.

    ids           int64 [L]
    flags         bool [L], the token was produced by the target (the end token included)
    finish_reason "eos", "stop_string", "length" (cut by max_new_tokens) or "loop" (cut where a loop begins)
    features_TF   float32 [L−1, F], raw tapped states, or None (data.features: online)
    final_TD      float32 [L−1, D], the post-norm state that lm_head reads, or None
    lse_T         float32 [L−1], log-sum-exp of the full-vocabulary logits, or None
    extra         what else is worth keeping (JSON values): turn, source, the answer's text
    """

    id: str
    category: str
    ids: Tensor
    flags: Tensor
    finish_reason: str = "eos"
    temperature: float = 0.0
    seed: int = 0
    features_TF: Tensor | None = None
    final_TD: Tensor | None = None
    lse_T: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.ids.shape[0]


STATES = Literal["fp16", "fp8", "int8"]
# How the states of a token are kept: the numbers' type, what the largest of a group of channels becomes (None: unit rms), channels of a group
# (None: a whole tap's). Beside a channel of 25,000 little is left of the others in a byte: small groups.
_KINDS: dict[str, tuple[torch.dtype, float | None, int | None]] = {
    "fp16": (torch.float16, None, None), "fp8": (torch.float8_e4m3fn, 448.0, 64), "int8": (torch.int8, 127.0, 64),
}


def normalise(values_SF: Tensor, width: int, kind: STATES = "fp16") -> tuple[Tensor, Tensor]:
    """Float [S, F] → small numbers [S, F] and what to multiply each group of channels by, fp32 [S, G]. width: D of one tap.

    fp16: unit rms per tap, relative error 2^-11. Per 64 channels: fp8 (e4m3) has a relative error of 2^-4 down to 1/28,000 of the largest of them,
    int8 an error of 1/254 of the largest."""
    dtype, largest, group = _KINDS[kind]
    values_SGC = values_SF.float().reshape(values_SF.shape[0], -1, group_size(width, group))
    scale_SG = values_SGC.square().mean(-1).sqrt() if largest is None else values_SGC.abs().amax(-1) / largest
    small_SGC = values_SGC / scale_SG.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (small_SGC.round() if dtype == torch.int8 else small_SGC).flatten(-2).to(dtype), scale_SG


def group_size(width: int, group: int | None) -> int:
    """Channels that share a scale: `group` where it divides a tap's width, else the whole tap."""
    return group if group is not None and width % group == 0 else width


def restore(small_SF: Tensor, scale_SG: Tensor) -> Tensor:
    """The inverse of `normalise`, float32, whatever the kind."""
    slots, groups = scale_SG.shape
    small_SGC = small_SF.float().reshape(slots, groups, small_SF.shape[-1] // groups)
    return (small_SGC * scale_SG[..., None]).flatten(-2)


def bytes_per_token(taps: int, hidden: int, kind: STATES = "fp16") -> int:
    """Disk bytes of one captured token with this many taps (tokens and flags included; the readable .jsonl adds about 10)."""
    dtype, _, group = _KINDS[kind]
    state = dtype.itemsize * hidden + 4 * (hidden // group_size(hidden, group))
    return (taps + 1) * state + 4 + 5


def write_shard(folder: Path, name: str, rows: Sequence[Row], note: dict[str, Any] | None = None, states: STATES = "fp16") -> dict[str, Any]:
    """Write `name`.safetensors, `name`.jsonl and, last, the receipt `name`.json, which is returned. states: how they are kept.

    A shard without its receipt does not exist: a kill at any moment leaves either the whole shard or nothing.
    `note` goes into the receipt (distillation keeps the shard's key and its counts there).
    """
    (folder / f"{name}.json").unlink(missing_ok=True)  # made again: the old receipt must not vouch for new files
    with atomic_path(folder / f"{name}.safetensors") as part:
        save_file(_pack(rows, states), part)
    with atomic_path(folder / f"{name}.jsonl") as part, part.open("w", encoding="utf-8") as out:
        for row in rows:
            meta = {"id": row.id, "category": row.category, "tokens": len(row), "finish_reason": row.finish_reason,
                    "temperature": row.temperature, "seed": row.seed, "extra": row.extra}
            out.write(json.dumps(meta, ensure_ascii=False) + "\n")
    files = [folder / f"{name}.safetensors", folder / f"{name}.jsonl"]
    receipt = {
        "format": FORMAT, "name": name, "rows": len(rows), "tokens": sum(map(len, rows)),
        "answer_tokens": sum(int(r.flags.sum()) for r in rows),
        "bytes": [f.stat().st_size for f in files], "sha256": [sha256_file(f) for f in files], **(note or {}),
    }
    write_json(folder / f"{name}.json", receipt)
    return receipt


def _pack(rows: Sequence[Row], states: STATES) -> dict[str, Tensor]:
    empty = torch.zeros(0, dtype=torch.long)
    packed = {
        "lengths": torch.tensor([len(r) for r in rows], dtype=torch.int32),
        "ids": torch.cat([r.ids for r in rows] or [empty]).to(torch.int32),
        "flags": torch.cat([r.flags for r in rows] or [empty]).to(torch.uint8),
    }
    captured = [r for r in rows if r.features_TF is not None and r.final_TD is not None and r.lse_T is not None]
    if not captured:
        return packed
    if len(captured) != len(rows):
        raise ValueError(f"{len(captured)} of {len(rows)} rows carry features: a shard has them all or none")
    for row in rows:
        for key in ("features_TF", "final_TD", "lse_T"):
            slots = getattr(row, key).shape[0]
            if slots != len(row) - 1:
                raise ValueError(f"row {row.id!r}: {key} has {slots} slots, wanted {len(row) - 1} (its tokens minus one)")
    width = captured[0].final_TD.shape[-1]  # type: ignore[union-attr]
    for key, name in (("features_TF", "features"), ("final_TD", "final")):
        unit_SF, rms_SK = normalise(torch.cat([getattr(r, key).cpu() for r in rows]), width, states)
        packed |= {name: unit_SF.contiguous(), f"{name}_rms": rms_SK.contiguous()}
    packed["lse"] = torch.cat([r.lse_T.float().cpu() for r in rows])  # type: ignore[union-attr]
    return packed


def read_receipt(folder: Path, name: str, *, deep: bool = False) -> dict[str, Any] | None:
    """The receipt of a finished shard, or None where there is none. Raises ShardError where its files are missing, of another size,
    or (deep) of another sha256."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        receipt: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = receipt["format"] == FORMAT
        files = list(zip((folder / f"{name}.safetensors", folder / f"{name}.jsonl"), receipt["bytes"], receipt["sha256"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{path} is not a shard's receipt ({type(error).__name__}: {error}); {CURE}") from None
    if not known:
        raise ShardError(f"{path} has format {receipt['format']}, this version reads {FORMAT}; run specdec distill into a new run folder")
    for file, size, digest in files:
        found = file.stat().st_size if file.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, its receipt says {size}"
            raise ShardError(f"{file} {state}; {CURE}")
        if deep and sha256_file(file) != digest:
            raise ShardError(f"{file} is not the file that was written (sha256 differs); {CURE}")
    return receipt


def write_manifest(folder: Path, receipts: Sequence[dict[str, Any]], counts: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
    """manifest.json: the shards in order, the counts, free `facts` (provenance), and the data hash: everything that training reads."""
    body = {"format": FORMAT, "hash": _data_hash(receipts), "counts": counts, **(facts or {}), "shards": list(receipts)}
    write_json(folder / "manifest.json", body)


def _data_hash(receipts: Sequence[dict[str, Any]]) -> str:
    return content_hash([FORMAT, [r["sha256"] for r in receipts]])


class RowStore:
    """Finished rows in one folder, memory-mapped, read by index. Safe to hand to worker processes.

    lengths  list of int, tokens per row
    hash     the data hash, 16 hex digits
    counts   kept, dropped and failed rows by reason, as distillation counted them
    manifest the whole of manifest.json
    taps     whose states the rows hold, in this order; None: none (or rows from elsewhere)
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.hash: str = manifest["hash"]
        self.counts: dict[str, Any] = manifest["counts"]
        self.taps: list[int | str] | None = manifest.get("request", {}).get("taps")
        self._columns: list[int | None] | None = None
        self._names = [s["name"] for s in manifest["shards"]]
        self._open: dict[int, _Shard] = {}
        self._where: list[tuple[int, int]] = []
        self.lengths: list[int] = []
        for number, name in enumerate(self._names):
            sizes = _lengths(folder / f"{name}.safetensors")
            if len(sizes) != manifest["shards"][number]["rows"]:
                raise ShardError(f"{folder / name}: {len(sizes)} rows, the manifest says {manifest['shards'][number]['rows']}")
            self.lengths += sizes
            self._where += [(number, row) for row in range(len(sizes))]

    @classmethod
    def open(cls, folder: str | Path, *, deep: bool = False) -> RowStore:
        """Open a finished store. Raises RecipeError where there is none, ShardError where a shard is damaged (deep: sha256 too)."""
        folder = Path(folder)
        path = folder / "manifest.json"
        if not path.exists():
            raise RecipeError(f"no distilled data in {folder} (no manifest.json); run specdec distill --recipe R first")
        try:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            named = [s["name"] for s in manifest["shards"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{path} is not a manifest ({type(error).__name__}: {error}); run specdec distill again") from None
        for name, listed in zip(named, manifest["shards"], strict=True):
            receipt = read_receipt(folder, name, deep=deep)
            if receipt is None or receipt["sha256"] != listed["sha256"]:
                raise ShardError(f"{folder / name} is not the shard that manifest.json lists; run specdec distill again")
        return cls(folder, manifest)

    @classmethod
    def write(cls, folder: str | Path, rows: Iterable[Row], *, shard_rows: int = 64, counts: dict[str, Any] | None = None,
              states: STATES = "fp16") -> RowStore:
        """Write rows into a fresh folder and open it: for data from elsewhere, and for tests."""
        folder, rows = Path(folder), list(rows)
        folder.mkdir(parents=True, exist_ok=True)
        parts = [rows[i : i + shard_rows] for i in range(0, len(rows), shard_rows)]
        receipts = [write_shard(folder, shard_name(n), part, states=states) for n, part in enumerate(parts)]
        write_manifest(folder, receipts, {"rows": len(rows)} | (counts or {}))
        return cls.open(folder)

    def select(self, taps: Sequence[int | str]) -> RowStore:
        """The same rows with the states of these taps alone, in this order: what one head reads of a store made for several.

        "final" is in every row, captured or not. RecipeError where another tap is not.
        """
        stored = self.taps or []
        if missing := [t for t in taps if t not in stored and (t != "final" or self.taps is None)]:
            raise RecipeError(f"{self.folder} holds the states of {f'taps {stored}' if stored else 'no taps'}, the head reads {list(taps)}: "
                              f"name {missing} in data.taps where these rows are made and distil again, or set data.features: online")
        chosen = copy.copy(self)
        chosen._open = {}
        chosen._columns = None if list(taps) == stored else [stored.index(t) if t in stored else None for t in taps]
        return chosen

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        shard, row = self._find(index)
        ids, flags = shard.tokens(row)
        meta = shard.metas[row]
        features_TF, final_TD, lse_T = shard.states(row, self._columns)
        return Row(meta["id"], meta["category"], ids, flags, meta["finish_reason"], meta["temperature"], meta["seed"],
                   features_TF, final_TD, lse_T, meta["extra"])

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """ids int64 [L] and flags bool [L] without the states: for counting a vocabulary."""
        shard, row = self._find(index)
        return shard.tokens(row)

    def _find(self, index: int) -> tuple[_Shard, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a store of {len(self)}")
        number, row = self._where[index]
        if number not in self._open:
            if len(self._open) >= MAX_OPEN_SHARDS:  # the oldest goes: a large store would use up the maps a process may have
                self._open.pop(next(iter(self._open)))
            self._open[number] = _Shard(self.folder, self._names[number])
        return self._open[number], row

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # open maps do not travel to worker processes


class _Shard:
    """One open shard: row r's tokens are [starts[r], starts[r+1]), its slots one fewer per row before it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = _safe_open(folder / f"{name}.safetensors")
        self.captured = "features" in self.file.keys()
        lengths = self.file.get_tensor("lengths").tolist()
        self.starts = [0]
        for length in lengths:
            self.starts.append(self.starts[-1] + length)
        # Not splitlines(): JSON strings may hold U+2028 and its kin, which are no line ends here.
        path = folder / f"{name}.jsonl"
        try:
            self.metas = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except (OSError, ValueError) as error:
            raise ShardError(f"{path} cannot be read ({error}); {CURE}") from None

    def tokens(self, row: int) -> tuple[Tensor, Tensor]:
        span = slice(self.starts[row], self.starts[row + 1])
        return self.file.get_slice("ids")[span].long(), self.file.get_slice("flags")[span].bool()

    def states(self, row: int, columns: Sequence[int | None] | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """columns: which of the stored taps, in this order (None: the final state); None: all as they are stored."""
        if not self.captured:
            return None, None, None
        span = slice(self.starts[row] - row, self.starts[row + 1] - row - 1)
        features_SF, rms_SK, final_SD, final_rms_S1, lse_S = (
            self.file.get_slice(name) for name in ("features", "features_rms", "final", "final_rms", "lse"))
        final_TD, scale_TG = restore(final_SD[span], final_rms_S1[span]), rms_SK[span]
        if columns is None:
            return restore(features_SF[span], scale_TG), final_TD, lse_S[span]
        D, G = final_TD.shape[-1], final_rms_S1.get_shape()[1]  # width and groups of one tap
        parts = [final_TD if k is None else restore(features_SF[span, k * D : (k + 1) * D], scale_TG[:, k * G : (k + 1) * G]) for k in columns]
        return torch.cat(parts, -1), final_TD, lse_S[span]


def _safe_open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ShardError(f"{path} cannot be read ({' '.join(str(error).split())}); {CURE}") from None


def _lengths(path: Path) -> list[int]:
    return [int(n) for n in _safe_open(path).get_tensor("lengths").tolist()]


def rows_folder(recipe: Recipe) -> Path:
    """Where the rows are that this recipe trains on."""
    if recipe.data.rows is None:
        return recipe.run_dir / "distill"
    given = Path(recipe.data.rows)
    return given / "distill" if (given / "distill").is_dir() else given


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def shard_names(folder: Path) -> list[str]:
    """Names of all shards that have a file in the folder, finished or not."""
    return sorted({m.group(0) for p in folder.glob("shard-*") if (m := re.match(r"shard-\d{5,}", p.name))})


def row_seed(seed: int, row_id: str) -> int:
    """A row's own seed (63 bits) from the recipe's seed and the row's id: independent of the order of rows."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:8], "big") >> 1
