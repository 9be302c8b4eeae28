"""One vLLM engine on the CPU, run by its own environment's Python, which has no draftheads: prompts in, its tokens and its own counters out.

    .venv-vllm/bin/python benchmarks/vllm_engine.py JOBS.json RESULTS.json

JOBS: [{"model", "speculative": {…} or null, "prompts": [[ids]], "max_tokens", "dtype", "max_num_seqs", "max_model_len"}, …], one engine after the
other; judge.py writes it. RESULTS: [{"tokens", "counters", "seconds"} or {"error"}, …]
"""

import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main(jobs_file: str, results_file: str) -> None:
    results = []
    for job in json.loads(Path(jobs_file).read_text(encoding="utf-8")):
        try:
            results.append(run(job))
        except Exception:  # an engine that refuses a head is a result too
            results.append({"error": traceback.format_exc()})
        gc.collect()
    Path(results_file).write_text(json.dumps(results), encoding="utf-8")


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    # Without prefix caching every prompt is prefilled, by target and draft alike; without enforce_eager torch would compile for minutes.
    engine = LLM(
        model=job["model"], dtype=job["dtype"], speculative_config=job["speculative"], max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"], enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, seed=0,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    before, began = counters_of(engine), time.monotonic()
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    seconds, after = time.monotonic() - began, counters_of(engine)
    # Counters belong to the process and not to the engine.
    counters = {name: [b - a for a, b in zip(before.get(name, [0] * len(after[name])), after[name], strict=True)] for name in after}
    return {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters, "seconds": seconds}


def counters_of(engine: Any) -> dict[str, list[int]]:
    """{"drafts": [n], "draft_tokens": [n], "accepted_tokens": [n], "accepted_tokens_per_pos": [n, …]}"""
    found: dict[str, list[int]] = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            values = list(metric.values) if hasattr(metric, "values") else [metric.value]
            found[metric.name.removeprefix("vllm:spec_decode_num_")] = [int(v) for v in values]
    return found


if __name__ == "__main__":  # the engine's workers import this file
    main(*sys.argv[1:])
