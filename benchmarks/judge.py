"""vLLM as the judge of exported heads: what it makes of a folder, by its own counters, beside what specdec-eval says of it.

    serve    prompts ─► vllm_engine.py in the engine's environment ─► Served
    server   vLLM's own HTTP server, for as long as one wants it
    agree    the same prompts, γ and length by specdec-eval ─► its τ and rates per position, beside vLLM's

The engine's environment is made by `make env-vllm` (.venv-vllm); VLLM_PYTHON names another one's Python.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.eval.records import Block, read_journal
from draftheads.eval.run import evaluate
from draftheads.eval.subject import open_checkpoint, read_conversations, render_prompts
from draftheads.inference.target import load_target

ROOT = Path(__file__).resolve().parent.parent
ENGINE = Path(__file__).with_name("vllm_engine.py")
LOG_LINES, BATCH, START_S = 40, 16, 300


@dataclass
class Served:
    """tokens: per prompt; drafts: rounds in which something was drafted; accepted, per_position: counts. tau includes the bonus token."""

    tokens: list[list[int]]
    drafts: int
    drafted: int
    accepted: int
    per_position: list[int]
    seconds: float

    @property
    def tau(self) -> float:
        return 1 + self.accepted / self.drafts

    @property
    def rates(self) -> list[float]:
        """Share of all drafts whose position i was accepted."""
        return [n / self.drafts for n in self.per_position]


class EngineError(RuntimeError):
    """vLLM ended without a result. The message has the end of its log."""


def engine_python() -> Path:
    python = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.exists():
        raise EngineError(f"no vLLM environment at {python}: run make env-vllm, or name its Python: VLLM_PYTHON=/path/to/python")
    return python


def job(
    target: Path, prompts: list[list[int]], *, speculative: dict[str, Any] | None = None, max_tokens: int, dtype: str = "float32",
) -> dict[str, Any]:
    """Greedy, end tokens ignored. target: a transformers folder; speculative: vLLM's speculative_config."""
    return {"model": str(target), "speculative": speculative, "prompts": prompts, "max_tokens": max_tokens, "dtype": dtype,
            "max_num_seqs": BATCH, "max_model_len": max(map(len, prompts)) + max_tokens + 64}


def serve(jobs: list[dict[str, Any]], *, threads: int | None = None) -> list[Served | EngineError]:
    """Each job by an engine of its own, in one process. An engine that fails is an EngineError in its place; it is raised if the process dies."""
    python = engine_python()
    env = _environment(python, threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory() as folder:
        asked, results = Path(folder) / "jobs.json", Path(folder) / "results.json"
        asked.write_text(json.dumps(jobs), encoding="utf-8")
        run = subprocess.run([str(python), str(ENGINE), str(asked), str(results)], cwd=folder, env=env, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        if run.returncode or not results.exists():
            raise EngineError(f"vLLM ended with {run.returncode}:\n" + "\n".join(run.stdout.splitlines()[-LOG_LINES:]))
        return [_served(found) for found in json.loads(results.read_text(encoding="utf-8"))]


def _environment(python: Path, threads: int | None) -> dict[str, str]:
    preload = python.parent.parent / "lib" / "libiomp5.so"
    env = {
        **os.environ, "OMP_NUM_THREADS": str(threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Without Intel's OpenMP in front, CPU attention runs some ten times slower.
        **({"LD_PRELOAD": str(preload)} if preload.exists() else {}),
    }
    env.pop("PYTHONPATH", None)
    return env


@contextmanager
def server(target: Path, *, max_model_len: int, threads: int | None = None, dtype: str = "float32") -> Iterator[str]:
    """vLLM's OpenAI-compatible server for a transformers folder, as long as the context lasts. -> its URL, up to and with /v1"""
    python, port = engine_python(), _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--served-model-name", "target", "--dtype", dtype,
               "--enforce-eager", "--max-model-len", str(max_model_len), "--max-num-seqs", str(BATCH), "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, cwd=folder, env=_environment(python, threads), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", child)
            yield f"http://127.0.0.1:{port}/v1"
        except EngineError as error:
            log.seek(0)
            raise EngineError(f"{error}:\n" + "\n".join(log.read().splitlines()[-LOG_LINES:])) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)  # its engine is a process of its own
            child.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_for(url: str, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise EngineError(f"vLLM's server ended with {child.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise EngineError(f"vLLM's server did not answer in {START_S} s")


def _served(found: dict[str, Any]) -> Served | EngineError:
    if "error" in found:
        return EngineError(found["error"])
    c = found["counters"]
    drafts, drafted, accepted = (sum(c.get(name, [0])) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return Served(found["tokens"], drafts, drafted, accepted, c.get("accepted_tokens_per_pos", []), found["seconds"])


def agree(
    name: str, ckpt: Path, target: Path | None, method: str | None, *, gamma: int, per_category: int, max_new_tokens: int,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A head by specdec-eval and by vLLM: the same prompts, greedy, float32, end tokens ignored, no round trimmed.

    ckpt: an exported folder, for vLLM; target: its target as a transformers folder; method: vLLM's name, None: specdec-eval alone. extra: more keys
    of vLLM's speculative_config. -> both acceptance lengths and their relative difference, the rates per position, and how many texts are the same
    token by token in both.
    """
    options = {
        "drafters": ["head"], "gamma": gamma, "tau_gamma": gamma, "per_category": per_category, "max_new_tokens": max_new_tokens, "ignore_eos": True,
        "draft_weights": "float32", "batch_size": BATCH, "transformers_fraction": 0.0, "tree": "chain", "temperature": 0.0, "costs": False,
    }
    checkpoint = open_checkpoint(ckpt, [], options)
    with tempfile.TemporaryDirectory() as out:
        report = evaluate(checkpoint, out=Path(out), quiet=True).report
        blocks = [Block.from_json(entry) for entry in read_journal(Path(out) / "records.jsonl") if entry["kind"] == "block"]
    ours = report["by_drafter"]["head"]
    texts = {c.request.id: c.tokens for b in blocks for c in b.runs["head"].completions}
    found = {"head": name, "gamma": gamma, "prompts": len(texts), "tokens": sum(map(len, texts.values())), "tau_untrimmed": ours["tau_untrimmed"],
             "per_position": ours["acceptance_per_position"]}
    if method is None or target is None:
        return found
    prompts = render_prompts(load_target(checkpoint.recipe.target), read_conversations(checkpoint.recipe.eval)[0], max_new_tokens)
    speculative = {"method": method, "model": str(ckpt), "num_speculative_tokens": gamma, **(extra or {})}
    [served] = serve([job(target, [list(p.ids) for p in prompts], max_tokens=max_new_tokens, speculative=speculative)])
    if isinstance(served, EngineError):
        raise served
    same = sum(texts[p.id] == tokens for p, tokens in zip(prompts, served.tokens, strict=True))
    return found | {"vllm_acceptance_length": served.tau, "difference": served.tau / ours["tau_untrimmed"] - 1, "vllm_per_position": served.rates,
                    "same_texts": same, "vllm_seconds": served.seconds}
