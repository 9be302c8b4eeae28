"""How the data pipeline grows: seconds and memory for many rows, and for the prompts of a file.

    python benchmarks/data.py rows    --rows 10000,100000            rows of tokens: written, opened, surveyed, an epoch planned; peak memory of each
    python benchmarks/data.py prompts --prompts FILE [--target NAME]  read, deduplicated, checked against the evaluation's; rendered; masked

Each measurement is a process of its own, so that its peak is its own. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCABULARY, SHORTEST, LONGEST, SHARD_ROWS = 49152, 40, 460, 512


@contextmanager
def timed(found: dict[str, Any], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    found[name] = round(time.perf_counter() - began, 2)


def rows(count: int) -> dict[str, Any]:
    import torch

    from draftheads.data.batches import global_batches
    from draftheads.data.features import Row, RowStore, shard_name, write_manifest, write_shard
    from draftheads.recipes.schema import TrainSection
    from draftheads.train.examples import survey

    found: dict[str, Any] = {"rows": count, "empty process, MiB": peak()}
    g = torch.Generator().manual_seed(0)

    def row(i: int) -> Row:
        length = int(torch.randint(SHORTEST, LONGEST, (), generator=g))
        ids = torch.randint(VOCABULARY, (length,), generator=g)
        return Row(f"row-{i}", "c", ids, torch.arange(length) >= length // 3, extra={"answer": "x" * 3 * length})

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with timed(found, "write, s"):
            receipts = [write_shard(folder, shard_name(n), [row(i) for i in range(first, min(first + SHARD_ROWS, count))])
                        for n, first in enumerate(range(0, count, SHARD_ROWS))]
            write_manifest(folder, receipts, {"rows": count})
        found["after writing, MiB"] = peak()
        with timed(found, "open, s"):
            store = RowStore.open(folder)
        train = TrainSection(batch_tokens=16384)
        with timed(found, "survey, s"):
            seen = survey(store, train, VOCABULARY)
        with timed(found, "plan an epoch, s"):
            batches = global_batches(seen.lengths, batch_tokens=train.batch_tokens, seed=0, epoch=0)
        padded = sum(max(seen.lengths[i] for i in b) * len(b) for b in batches)
        found |= {"tokens": sum(seen.lengths), "padding": round(1 - sum(seen.lengths) / padded, 4), "peak, MiB": peak()}
    return found


def prompts(file: str, name: str) -> dict[str, Any]:
    from draftheads.data.hygiene import Seen
    from draftheads.data.select import EVALUATION, read_prompts
    from draftheads.data.template import answer_mask, render
    from draftheads.inference.described import describe_target
    from draftheads.recipes.schema import TargetSection

    found: dict[str, Any] = {}
    with timed(found, "read, deduplicate, check overlap, s"):
        talks, dropped = read_prompts(file, held_out=Seen(read_prompts("builtin", builtin=EVALUATION)[0]))
    found |= {"prompts": len(talks), "dropped": dropped}
    tokenizer = describe_target(TargetSection(name=name)).tokenizer
    with timed(found, "render and tokenise, s"):
        tokens = sum(len(render(tokenizer, t.asks()[0].added, add_generation_prompt=True)) for t in talks if t.messages)
    answered = [[*t.asks()[0].added, {"role": "assistant", "content": "The answer, in a sentence or two."}] for t in talks if t.messages]
    with timed(found, "mask an answer of each, s"):
        flags = sum(sum(answer_mask(tokenizer, messages)[1]) for messages in answered)
    return found | {"prompt tokens": tokens, "masked tokens": flags, "peak, MiB": peak()}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "prompts"))
    parser.add_argument("--rows", default="10000,100000", help="numbers of rows, separated by commas")
    parser.add_argument("--prompts", help="a JSONL file")
    parser.add_argument("--target", default="smollm2-135m", help="whose tokenizer and template")
    options = parser.parse_args()
    if options.what == "prompts":
        if not options.prompts:
            parser.error("--prompts FILE is wanted")
        print(json.dumps(prompts(options.prompts, options.target), indent=1))
        return
    numbers = options.rows.split(",")
    if len(numbers) == 1:
        print(json.dumps(rows(int(numbers[0])), indent=1))
        return
    for number in numbers:
        subprocess.run([sys.executable, __file__, "rows", "--rows", number], check=True)


if __name__ == "__main__":
    main()
