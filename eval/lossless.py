"""Is the output still the target's own? Greedy: token equality, with every difference explained or not. Sampling: a martingale.

greedy    first difference ─► the target's logits after the common prefix, recomputed ─► tie (both tokens within `bound` of the top) or unexplained
sampling  Z = Σ (log p(x_t) + H_t) / √ Σ Var_t over all tokens of all rows (inference.metrics.martingale_z): each term has mean 0 and
          variance Var_t if x_t was drawn from p

The martingale costs no reference run and sees any bias in log p (a bonus token drawn from the wrong distribution moved it by 10 standard
deviations in 4k tokens); it misses a bias that keeps the mean of log p, so the χ² tests of the sampling rules stand beside it. With a lossy rule
it says how far the output is from the target's, and accuses nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftheads.inference.requests import Sampling
    from draftheads.inference.target import Target

IDENTICAL, TIE, UNEXPLAINED = "identical", "tie", "unexplained"
# |Z| beyond this has a probability of 6e-5 under losslessness.
MAX_Z = 4.0


@dataclass(frozen=True)
class Divergence:
    """How one output relates to the reference. position and below are None when identical. gap: distance of the lower of the two tokens'
    logits from the top logit (so a tie needs both tokens at the top); bound: what still counts as a tie."""

    verdict: str
    position: int | None = None
    expected: int | None = None
    found: int | None = None
    gap: float | None = None
    bound: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing token, the shorter length if one is a prefix of the other, None if equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def tie_bound(dtype: str, top: float) -> float:
    """fp32: 1e-3 (DESIGN). Half precision cannot tell logits apart that closely: four units in the last place of the top logit."""
    bits = {"bfloat16": 8, "float16": 11}.get(dtype)
    return 1e-3 if bits is None else max(1e-3, 4 * abs(top) * 2.0**-bits)


def compare(
    expected: Sequence[int], found: Sequence[int], logits_after: Callable[[list[int]], Sequence[float]], dtype: str = "float32"
) -> Divergence:
    """`logits_after(prefix)` gives the target's next-token logits [V] after prompt + prefix; it is called only if the outputs differ."""
    at = first_difference(expected, found)
    if at is None:
        return Divergence(IDENTICAL)
    if at >= min(len(expected), len(found)):  # one ended where the other went on without an end token: never a tie
        return Divergence(UNEXPLAINED, at, expected[at] if at < len(expected) else None, found[at] if at < len(found) else None)
    logits = logits_after(list(expected[:at]))
    top = float(max(logits))
    gap = top - min(float(logits[expected[at]]), float(logits[found[at]]))
    bound = tie_bound(dtype, top)
    return Divergence(TIE if gap <= bound else UNEXPLAINED, at, expected[at], found[at], gap, bound)


def target_logits(target: Target, prompt_ids: Sequence[int], sampling: Sampling) -> Callable[[list[int]], Sequence[float]]:
    """Next-token logits by one plain causal forward over prompt + prefix (no tree, no earlier cache), processed by what looks at the history."""
    import torch

    from draftheads.heads.tree import DraftTree
    from draftheads.inference.processors import History, wanted

    def after(prefix: list[int]) -> Sequence[float]:
        ids_1T = torch.tensor([[*prompt_ids, *prefix]], device=target.device)
        with torch.no_grad():
            final_1TD, _ = target.extend(target.new_cache(1, ids_1T.shape[1]), slice(0, 1), ids_1T)
            logits_11V = target.logits(final_1TD[:, -1:]).float()
            if wanted(sampling):
                history = History(1, ids_1T.shape[1], logits_11V.shape[-1], target.eos_ids, sampling, target.device)
                history.start(0, ids_1T[0, : len(prompt_ids)])
                history.extend(ids_1T[:, len(prompt_ids) :], torch.tensor([len(prefix)], device=target.device))
                logits_11V = history.process(logits_11V, DraftTree.chain(ids_1T[:, -1], ids_1T[:, :0]), slice(0, 1))
            row: list[float] = logits_11V[0, 0].tolist()
        return row

    return after
