"""How far a tuned target (train.lora, Medusa-2) is from the original: lossless decoding keeps its text, so the change in quality is measured apart.

    prompts ─► their own text under both ─► perplexity            what both make of text that neither wrote
    prompts + the answers that were decoded without drafts ─► KL(original ‖ tuned), agreement of their first choices, token by token

The original is loaded for this, after everything that is timed, and once: the figures are kept with the records.

Shape suffixes: T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftheads.eval.records import Block, Journal
from draftheads.eval.work import Evaluation
from draftheads.inference.target import Target, load_target

CHUNK = 256  # positions whose logits exist at one time
STATEMENT = "Lossless is with respect to the tuned model, not the original."


def measure_drift(work: Evaluation, journal: Journal, blocks: Sequence[Block]) -> dict[str, Any] | None:
    """The report's `tuned`; None for a target as it was published."""
    if work.target.adapter is None:
        return None
    if done := journal.of("tuned"):
        return {k: v for k, v in done[0].items() if k != "kind"}
    answers = {c.request.id: c.tokens for b in blocks for c in next(iter(b.runs.values())).completions}
    answers |= {c.request.id: c.tokens for b in blocks if "none" in b.runs for c in b.runs["none"].completions}
    work.progress.stage("the original target, for comparison", len(work.prompts), "prompts")
    original = load_target(work.checkpoint.recipe.target, device=str(work.target.device))
    sums = dict.fromkeys(("text", "text_original", "text_tuned", "answer", "kl", "agree"), 0.0)
    # A folder that `specdec export --target-out` wrote, named as the target, has no original to compare with.
    for prompt in work.prompts if original.adapter is None else []:
        for name, value in compare(original, work.target, prompt.ids, answers.get(prompt.id, [])).items():
            sums[name] += value
        work.progress.advance(1)
    work.progress.finish()
    found = figures(sums)
    journal.append("tuned", found)
    return found


@torch.no_grad()
def compare(original: Target, tuned: Target, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, float]:
    """Sums over one prompt's text (from its second token) and over its answer: negative log-likelihoods, KL in nats, equal first choices."""
    ids = torch.tensor([[*prompt, *answer]])
    finals = [_states(target, ids[:, :-1]) for target in (original, tuned)]
    split = len(prompt) - 1  # position i predicts token i + 1
    found = {"text": float(split), "text_original": 0.0, "text_tuned": 0.0, "answer": float(len(answer)), "kl": 0.0, "agree": 0.0}
    for start in range(0, ids.shape[1] - 1, CHUNK):
        logp, logq = (target.logits(final[start : start + CHUNK]).double().log_softmax(-1) for target, final in zip((original, tuned), finals,
                                                                                                                 strict=True))
        next_T = ids[0, start + 1 : start + 1 + len(logp)].to(logp.device)
        in_text = torch.arange(start, start + len(logp), device=logp.device) < split
        for name, values in (("text_original", logp), ("text_tuned", logq)):
            found[name] -= values.gather(-1, next_T[:, None])[in_text].sum().item()
        kl_T = (logp.exp() * (logp - logq.to(logp.device))).sum(-1)
        found["kl"] += kl_T[~in_text].sum().item()
        found["agree"] += (logp.argmax(-1) == logq.argmax(-1).to(logp.device))[~in_text].sum().item()
    return found


def _states(target: Target, ids_1T: Tensor) -> Tensor:
    cache = target.new_cache(1, ids_1T.shape[1])
    return target.extend(cache, slice(0, 1), ids_1T.to(target.device))[0][0]


def figures(sums: Mapping[str, float]) -> dict[str, Any]:
    """None where nothing was counted."""
    def mean(name: str, of: str) -> float | None:
        return sums[name] / sums[of] if sums[of] else None

    losses = {name: mean(f"text_{name}", "text") for name in ("original", "tuned")}
    return {
        "statement": STATEMENT, "prompt_tokens": int(sums["text"]), "answer_tokens": int(sums["answer"]),
        "perplexity": {name: None if loss is None else math.exp(min(loss, 700.0)) for name, loss in losses.items()},
        "kl": mean("kl", "answer"), "top1_agreement": mean("agree", "answer"),
    }

