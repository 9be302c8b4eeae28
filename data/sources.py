"""Where prompts come from: records of a file, a Hub data set or a package, one after the other, never all at once in memory.

    'builtin' | FILE.jsonl | FILE.json | FILE.parquet | org/name[/config][:split] ─► (source, record) pairs

JSONL is read line by line and Parquet batch by batch; a Hub data set is downloaded by `datasets`, or streamed (data.streaming).
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from draftheads.recipes.schema import RecipeError

FILES = (".jsonl", ".ndjson", ".json", ".parquet")
Record = dict[str, Any]


def records(spec: str, builtin: str, *, streaming: bool = False, most: int | None = None) -> Iterator[tuple[str, Record]]:
    """(source, record) pairs; the source is the file's or data set's name. builtin: the package whose *.jsonl files 'builtin' names.
    streaming: of a Hub data set, read what is needed and keep no copy. most: of each source, the first so many."""
    return islice(_all(spec, builtin, streaming), most)


def _all(spec: str, builtin: str, streaming: bool) -> Iterator[tuple[str, Record]]:
    if spec == "builtin":
        files = sorted((f for f in importlib.resources.files(builtin).iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
        if not files:
            raise RecipeError(f"the package {builtin} holds no *.jsonl prompts; reinstall draftheads, or set data.prompts to a file")
        for file in files:
            with importlib.resources.as_file(file) as path:
                for record in _jsonl(path, file.name):
                    yield file.name.removesuffix(".jsonl"), record
        return
    path = Path(spec).expanduser()
    if path.suffix in FILES or path.is_file():
        for record in _file(path):
            yield path.stem, record
    elif path.exists() or spec.startswith((".", "/", "~")):
        raise RecipeError(f"{spec}: no such prompts file (wanted {', '.join(FILES)}, a Hub data set id, or 'builtin')")
    else:
        name, _, split = spec.partition(":")
        name, config = hub_name(name)
        for record in _load_dataset(spec, name, *([config] if config else []), split=split or "train", **({"streaming": True} if streaming else {})):
            yield name, record


def hub_name(name: str) -> tuple[str, str | None]:
    """'org/name/config' → ('org/name', 'config'); without a third part there is no config."""
    org, _, rest = name.partition("/")
    name, _, config = rest.partition("/")
    return (f"{org}/{name}" if name else org), config or None


def _file(path: Path) -> Iterable[Record]:
    if not path.is_file():
        raise RecipeError(f"no prompts file {path}; data.prompts takes a JSONL or Parquet file, a Hub data set id, or 'builtin'")
    if path.suffix == ".parquet":
        return _load_dataset(str(path), "parquet", data_files=str(path), split="train", streaming=True)
    if path.suffix == ".json" and (found := _array(path)) is not None:
        return found
    return _jsonl(path, str(path))


def _array(path: Path) -> list[Record] | None:
    """The objects of a JSON array; None where the file begins otherwise (then it holds an object a line)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not text.lstrip().startswith("["):
            return None
        found = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read {path}: {error}; wanted UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not valid JSON: {error}") from None
    return [_object(r, f"{path}, record {i + 1}") for i, r in enumerate(found)]


def _jsonl(path: Path, name: str) -> Iterator[Record]:
    try:
        # "\n" alone ends a line: JSON strings may hold U+2028 and its kin.
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _object(_parsed(line, f"{name}, line {number}"), f"{name}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read {path}: {error}; wanted UTF-8 text") from None


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: not valid JSON ({error}); mend or remove the line") from None


def _object(record: Any, where: str) -> Record:
    if not isinstance(record, dict):
        raise RecipeError(f"{where}: wanted a JSON object like {{\"messages\": […]}}, found {type(record).__name__}")
    return record


def _load_dataset(spec: str, *args: Any, **options: Any) -> Iterator[Record]:
    import datasets

    try:
        yield from datasets.load_dataset(*args, **options)
    except RecipeError:
        raise
    except Exception as error:  # the hub client, arrow and the network raise dozens of kinds
        first = str(error).strip().splitlines() or [""]
        raise RecipeError(f"cannot read the data set {spec}: {type(error).__name__}: {first[0][:200]}. Give a JSONL or Parquet file, "
                          f"'builtin', or a Hub id with its split, like org/name:train_sft") from None
