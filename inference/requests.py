"""What goes into `decode()` and what comes out of it: plain records, no behaviour.

Request ─► decode(target, drafter, requests, sampling, limits) ─► Round, Round, … (each may carry finished Completions)

Shape suffixes: T tokens of one row, F feature width (number of taps · D), D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One prompt to continue. `seed` keys the row's noise: same seed, same output, whatever its batch-mates."""

    id: str
    prompt_ids: tuple[int, ...]
    seed: int = 0
    max_new_tokens: int | None = None  # None: Limits.max_new_tokens
    temperature: float | None = None  # None: Sampling.temperature


@dataclass(frozen=True)
class Sampling:
    """What the target samples from, in transformers' order: repetition penalty, no-repeat n-gram, minimum length (these three look at what was
    written, so in a tree each path has its own), then temperature, top-k, top-p, min-p. temperature 0 is greedy. The defaults are off.

    lossy: "typical" accepts by Medusa's typical acceptance (arXiv 2401.10774 §2.3.1) with `typical_epsilon` and `typical_alpha`: the
    output is then *not* a draw from the target. None is lossless.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    lossy: str | None = None
    typical_epsilon: float = 0.09
    typical_alpha: float = 0.3


@dataclass(frozen=True)
class Limits:
    """max_new_tokens per row; max_len is the cache's length (prompt + new tokens + the widest tree must fit)."""

    max_new_tokens: int = 128
    max_len: int = 1024
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass
class RoundStat:
    """One propose + verify of one row.

    drafted  drafted tokens on the longest path of the row's tree (γ of this round; 0 for drafter `none`)
    nodes    drafted nodes in the tree (= drafted for a chain)
    accepted drafted tokens accepted by the rule, before trimming
    emitted  tokens this round added to the output, bonus token included, after trimming at the end of the answer
    source   which drafter proposed ("none", "ngram", "head", …)
    """

    drafted: int
    nodes: int
    accepted: int
    emitted: int
    source: str = "none"


@dataclass
class Captured:
    """Target states of one row, recorded while it was generated; T = prompt + output − 1 (the last token was never fed).

    features_TF  float32 [T, F], the tapped residual-stream states, concatenated in the order of the taps
    final_TD     float32 [T, D], the post-norm state that lm_head reads
    lse_T        float32 [T], log-sum-exp of the full-vocabulary logits (after softcap/scale, before temperature)
    """

    features_TF: Tensor
    final_TD: Tensor
    lse_T: Tensor


@dataclass
class Completion:
    """A finished row. tokens are the target's own ids, the end token included; finish_reason: "eos", "stop_string", "length" or "error"."""

    request: Request
    tokens: list[int]
    finish_reason: str
    rounds: list[RoundStat] = field(default_factory=list)
    captured: Captured | None = None
    text: str | None = None
    error: str | None = None
    decode_s: float = 0.0  # seconds spent in rounds while this row was active (prefill excluded)
    prefill_s: float = 0.0
    logprob_sum: float | None = None  # Σ log p(x_t) under the *processed* distribution; with the two below, the martingale z-score
    entropy_sum: float | None = None
    variance_sum: float | None = None


@dataclass
class Round:
    """What `decode` yields after each round (and after each prefill): new tokens per active row, and where the time went, in seconds."""

    new_tokens: dict[str, list[int]]  # request id -> tokens added in this round, trimmed
    accepted: dict[str, int]  # request id -> how many of them were drafted
    finished: list[Completion]
    width: int  # verify width w of the round; 0 for a prefill
    t_draft: float = 0.0
    t_verify: float = 0.0
    t_total: float = 0.0
