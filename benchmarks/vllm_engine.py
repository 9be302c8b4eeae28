"""One vLLM engine on the CPU, run by its own environment's Python, which has no draftheads: prompts in, its tokens and its own counters out.

    .venv-vllm/bin/python benchmarks/vllm_engine.py JOB.json RESULT.json

JOB: {"model", "speculative": {…} or null, "prompts": [[ids]], "max_tokens", "dtype", "max_num_seqs", "max_model_len"}; judge.py writes it.
"""

import json
import sys
import time
from pathlib import Path


def main(job_file: str, result_file: str) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    # Without prefix caching every prompt is prefilled, by target and draft alike; without enforce_eager torch would compile for minutes.
    engine = LLM(
        model=job["model"], dtype=job["dtype"], speculative_config=job["speculative"], max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"], enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, seed=0,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    began = time.monotonic()
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    seconds = time.monotonic() - began
    counters: dict[str, object] = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            counters[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    result = {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters, "seconds": seconds}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":  # the engine's workers import this file
    main(*sys.argv[1:])
