"""The one decoding loop, for generation, measuring and distillation. `drafter=NoDrafter()` is the autoregressive path: the same loop, width 1.

requests ─► prefill (root = first token, belongs to no round) ─► rounds ─► Completion
round: drafter.propose ─► target.extend(tree) ─► verify ─► cache.commit ─► drafter.observe ─► trim at the end of the answer

Active rows are a prefix of the cache's slots. A finished row's slot takes the next request at once (continuous batching: a single-row
prefill); when none is left, the last active row moves into the gap. With all slots free the next requests are prefilled together.
The host looks at the device once a round, at one small tensor.

Shape suffixes: B active rows, T prompt length (padded), N tree nodes, M nodes kept of a round (longest accepted path, root included),
F feature width, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.graphs import VIEW
from draftheads.inference.noise import Noise
from draftheads.inference.outcome import Columns, pack, read
from draftheads.inference.processors import History
from draftheads.inference.processors import wanted as wanted_history
from draftheads.inference.requests import Completion, Limits, Request, Round, RoundStat, Sampling
from draftheads.inference.rows import Row, StopStrings, longest, refusal, row_limit
from draftheads.inference.sampling import RowSampling, check, surprise
from draftheads.inference.shapes import MOST_NODES
from draftheads.inference.step import Step
from draftheads.inference.target import Target
from draftheads.inference.verify import verify
from draftheads.recipes.schema import RecipeError

# Slots kept free behind max_len: a row near its end writes its neighbours' tree width too, and no row can draft past its own room.
WIDEST = MOST_NODES + 1
# Prompts are prefilled together up to this many padded tokens, and their log-sum-exp is taken over this many positions at a time.
PREFILL_TOKENS, LSE_POSITIONS = 16384, 256


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    requests: Iterable[Request],
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    limits: Limits = Limits(),  # noqa: B008 - frozen
    *,
    batch_size: int = 1,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    capture_taps: tuple[int | str, ...] | None = None,
    certificate: bool = False,
    timed: bool = False,
    graphs: bool | None = None,
) -> Iterator[Round]:
    """Yield a Round after every prefill and every round; finished rows come as Completions in `Round.finished`, in the order they end.

    requests is read lazily, one row ahead of nothing. A request that cannot be served (empty, too long) ends with finish_reason "error"
    and its reason, before any work for it. capture_taps: record target states (Captured) with these taps, () for none but the final
    state. certificate: sum log p, entropy and variance of the emitted tokens. timed: synchronise CUDA around the phases, so that t_draft
    and t_verify are true (t_total always is). graphs: run rounds as captured CUDA graphs; None: on CUDA (target.graphs.status says what came of it;
    with processors that look at history, and for drafters that cannot, it is eager all the same). One decode() at a time per drafter.
    """
    loop = _Loop(target, drafter, iter(requests), sampling, limits, batch_size, plan, capture_taps, certificate, timed, graphs)
    try:
        yield from loop.run()
    finally:
        loop.close()


def complete(
    target: Target,
    drafter: Drafter,
    requests: Iterable[Request],
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    limits: Limits = Limits(),  # noqa: B008 - frozen
    **options: Any,
) -> list[Completion]:
    """All completions, in the order of the requests; the options are decode's."""
    wanted = list(requests)
    done = {c.request.id: c for r in decode(target, drafter, wanted, sampling, limits, **options) for c in r.finished}
    if len(done) < len(wanted):
        raise RecipeError(f"request ids must differ: {len(wanted)} requests, {len(done)} different ids")
    return [done[r.id] for r in wanted]


class _Loop:
    """The state of one decode() call. rows[b] lives in slot b."""

    def __init__(self, target: Target, drafter: Drafter, queue: Iterator[Request], sampling: Sampling, limits: Limits, batch_size: int,
                 plan: Plan, capture_taps: tuple[int | str, ...] | None, certificate: bool, timed: bool, graphs: bool | None) -> None:
        if batch_size < 1:
            raise RecipeError(f"batch_size is {batch_size}, it must be at least 1")
        check(sampling)
        self.target, self.drafter, self.queue, self.sampling, self.limits, self.plan = target, drafter, queue, sampling, limits, plan
        self.batch_size, self.certificate, self.device = batch_size, certificate, target.device
        self.clock = _Clock(self.device if timed and self.device.type == "cuda" else None)
        self.capture = capture_taps is not None
        wanted = capture_taps or ()
        self.taps = (*drafter.taps, *(t for t in wanted if t not in drafter.taps))
        D = target.geometry.hidden_size
        self.drafter_columns, self.capture_columns = Columns(self.taps, drafter.taps, D), Columns(self.taps, wanted, D)
        self.eos_ids: frozenset[int] = frozenset() if limits.ignore_eos else target.eos_ids
        self.stops = StopStrings(limits.stop_strings, self._text) if limits.stop_strings else None
        self.rows: list[Row] = []
        self.refused: list[Completion] = []  # reported with the next Round
        self.spare = WIDEST
        length = longest(target, limits) + self.spare
        drafter.claim()
        self.lent: tuple[int, int] | None = None
        try:
            self._make_buffers(length, sampling, certificate, target.device.type == "cuda" if graphs is None else graphs)
        except BaseException:
            self.close()
            raise

    def _make_buffers(self, length: int, sampling: Sampling, certificate: bool, graphed: bool) -> None:
        target, batch_size = self.target, self.batch_size
        cache = None
        if graphed:  # graphs hold addresses: buffers are lent by the target, for all calls of about this size
            key = (batch_size, -(-length // VIEW) * VIEW)
            cache = target.graphs.lend(target, key, lambda: target.new_cache(*key))
            if cache is not None:
                self.lent, length = key, key[1]
                for b in range(batch_size):
                    cache.clear(b)
        graphed = cache is not None  # another decode() has the buffers: this one is eager
        self.cache = target.new_cache(batch_size, length) if cache is None else cache
        self.history = None
        if wanted_history(sampling):
            self.history = History(batch_size, length, target.geometry.vocab_size, self.eos_ids, sampling, self.device)
        self.step = Step(target, self.cache, self.taps, history=self.history, states=self.capture, logp=certificate, graphs=graphed)
        self.drafter.lend(target.graphs if graphed else None)
        self.drafter.reset(batch_size, length, self.device)

    def close(self) -> None:
        """Whatever was lent goes back."""
        self.drafter.release()
        if self.lent is not None:
            self.target.graphs.give_back(self.target, self.lent)

    def run(self) -> Iterator[Round]:
        while True:
            while not self.rows and (requests := self._take(self.batch_size)):
                yield from self._fill(requests)
            if not self.rows:
                break
            yield self._round()
            yield from self._replace_finished()
        if self.refused:
            yield Round({}, {}, self._drain(), width=0)

    # ---- rows come and go

    def _take(self, count: int) -> list[Request]:
        """Up to `count` servable requests; the others go to `refused`."""
        taken: list[Request] = []
        while len(taken) < count and (request := next(self.queue, None)) is not None:
            error = refusal(request, self.target, self.limits)
            if error is None:
                taken.append(request)
            else:
                self.refused.append(Completion(request, [], "error", error=error))
        return taken

    def _drain(self) -> list[Completion]:
        refused, self.refused = self.refused, []
        return refused

    def _fill(self, requests: list[Request]) -> Iterator[Round]:
        """All slots are free: prefill as many together as is reasonable, the rest one by one."""
        together = 1
        while together < len(requests) and (together + 1) * max(len(r.prompt_ids) for r in requests[: together + 1]) <= PREFILL_TOKENS:
            together += 1
        yield self._prefill(slice(0, together), requests[:together])
        for b in range(together, len(requests)):
            yield self._prefill(slice(b, b + 1), [requests[b]])
        yield from self._replace_finished()

    def _replace_finished(self) -> Iterator[Round]:
        if all(row.finish_reason is not None for row in self.rows):
            for b in range(len(self.rows)):
                self.cache.clear(b)
            self.rows.clear()
            return
        # From the last slot down: what moves into a gap is always an active row.
        for b in reversed(range(len(self.rows))):
            while self.rows[b].finish_reason is not None:
                requests = self._take(1)
                if not requests:
                    self._close(b)
                    break
                self.cache.clear(b)
                yield self._prefill(slice(b, b + 1), requests)

    def _close(self, b: int) -> None:
        last = len(self.rows) - 1
        if b == last:
            self.cache.clear(b)
        else:
            self.cache.move(last, b)
            self.drafter.move(last, b)
            if self.history is not None:
                self.history.move(last, b)
            self.rows[b] = self.rows[last]
        self.rows.pop()
        self._rows_changed()

    def _rows_changed(self) -> None:
        """Rebuild what the rounds need per row; between changes it stays on the device."""
        self.seeds_B, self.row_sampling = self._per_row([row.request for row in self.rows])

    def _per_row(self, requests: list[Request]) -> tuple[Tensor, RowSampling]:
        seeds_B = torch.tensor([r.seed for r in requests], dtype=torch.int64, device=self.device)
        return seeds_B, RowSampling.of([r.temperature for r in requests], self.sampling, self.device)

    # ---- prefill

    def _prefill(self, slots: slice, requests: list[Request]) -> Round:
        """Forward the prompts into these slots (right-padded) and choose each row's first token, the root of its first round."""
        start = self.clock()
        lengths = [len(r.prompt_ids) for r in requests]
        ids_BT = torch.tensor([[*r.prompt_ids, *[0] * (max(lengths) - len(r.prompt_ids))] for r in requests], device=self.device)
        final_BTD, features_BTF = self.target.extend(self.cache, slots, ids_BT, taps=self.taps)
        self.cache.advance(slots, lengths)
        last_B = torch.tensor(lengths, device=self.device) - 1
        logits_B1V = self.target.logits(final_BTD[torch.arange(len(lengths), device=self.device), last_B][:, None])
        tree = DraftTree.chain(ids_BT.gather(1, last_B[:, None])[:, 0], ids_BT[:, :0])
        seeds_B, sampling = self._per_row(requests)
        if self.history is not None:
            for i in range(len(requests)):
                self.history.start(slots.start + i, ids_BT[i, : lengths[i]])
            logits_B1V = self.history.process(logits_B1V, tree, slots)
        verdict = verify(tree, logits_B1V, sampling, Noise(seeds_B, last_B), last_B)
        outcomes = read(pack(tree, verdict))
        if self.history is not None:
            self.history.extend(verdict.next_B[:, None], torch.ones_like(last_B), slots)
        certificates = self._certificates(verdict.logp_BNV, sampling, verdict.next_B[:, None])
        verified = self.clock()
        result = Round({}, {}, self._drain(), width=0, t_verify=verified - start)
        features_TF: Tensor | None
        for i, (request, T, outcome) in enumerate(zip(requests, lengths, outcomes, strict=True)):
            row = Row(request, row_limit(request, self.target, self.limits))
            b = slots.start + i
            self.rows[b : b + 1] = [row]
            result.new_tokens[request.id], result.accepted[request.id] = row.add(outcome.tokens, self.eos_ids, self.stops), 0
            features_TF = None if features_BTF is None else features_BTF[i, :T]
            if self.capture:
                row.chunks.append((self.capture_columns.of(features_TF), final_BTD[i, :T], self._lse(final_BTD[i, :T])))
            if certificates is not None:
                row.certify(certificates[i])
            if row.finish_reason is None:  # a row of one token needs no draft call
                self.drafter.start(b, ids_BT[i, :T], outcome.tokens[0], self.drafter_columns.of(features_TF))
        self._rows_changed()
        result.t_total = self.clock() - start
        result.t_draft = result.t_total - result.t_verify
        for row in self.rows[slots.start : slots.start + len(requests)]:
            row.prefill_s = result.t_total
            if row.finish_reason is not None:
                result.finished.append(row.complete(self.certificate))
        return result

    def _lse(self, final_TD: Tensor) -> Tensor:
        """Log-sum-exp of the logits; [T, V] never exists at once."""
        return torch.cat([self.target.logits(part).logsumexp(-1) for part in final_TD.split(LSE_POSITIONS)])

    # ---- a round

    def _round(self) -> Round:
        start = self.clock()
        slots = slice(0, len(self.rows))
        tree = self._propose(Noise(self.seeds_B, self.cache.lengths_B[slots].clone()))
        proposed = self.clock()
        stepped = self.step(slots, tree, self.seeds_B, self.row_sampling)
        verified = self.clock()
        counts = stepped.counts
        self.drafter.observe(stepped.tokens_BM, torch.tensor(counts), self.drafter_columns.of(stepped.features_BMF))
        if self.history is not None:
            self.history.extend(stepped.tokens_BM.to(self.device), torch.tensor(counts, device=self.device))
        certificates = self._certificates(stepped.logp_BMV, self.row_sampling, stepped.tokens_BM)
        result = Round({}, {}, self._drain(), width=tree.width, t_draft=proposed - start, t_verify=verified - proposed)
        captured_BMF = self.capture_columns.of(stepped.features_BMF)
        for b, (row, outcome) in enumerate(zip(self.rows, stepped.outcomes, strict=True)):
            if stepped.final_BMD is not None and stepped.lse_BM is not None:
                n = outcome.accepted + 1
                row.chunks.append((None if captured_BMF is None else captured_BMF[b, :n], stepped.final_BMD[b, :n], stepped.lse_BM[b, :n]))
            block = row.add(outcome.tokens, self.eos_ids, self.stops)
            source = "none" if outcome.nodes == 0 else tree.source_B[b] if tree.source_B is not None else self.drafter.name
            row.rounds.append(RoundStat(outcome.drafted, outcome.nodes, outcome.accepted, len(block), source))
            if certificates is not None:
                row.certify(certificates[b][: len(block)])
            result.new_tokens[row.request.id], result.accepted[row.request.id] = block, min(outcome.accepted, len(block))
        result.t_total = self.clock() - start
        for row in self.rows:
            row.decode_s += result.t_total
            if row.finish_reason is not None:
                result.finished.append(row.complete(self.certificate))
        return result

    def _propose(self, noise: Noise) -> DraftTree:
        # A round always emits one token that nobody drafts, hence − 1.
        room_B = tuple(row.room - 1 for row in self.rows)
        if not any(room_B):
            root_B = torch.tensor([row.tokens[-1] for row in self.rows], device=self.device)
            return DraftTree.chain(root_B, root_B[:, None][:, :0])
        tree = self.drafter.propose(replace(self.plan, room_B=room_B), self.row_sampling, noise)
        if tree.width > self.spare:
            raise RecipeError(f"drafter {self.drafter.name} proposed {tree.width} nodes, but the cache has room for {self.spare}: lower gamma")
        return tree

    def _certificates(self, logp_BMV: Tensor | None, sampling: RowSampling, tokens_BM: Tensor) -> list[list[list[float]]] | None:
        """Per row and emitted token: log p, entropy, variance. Greedy rows have p = 1: zeros."""
        if not self.certificate or logp_BMV is None:
            return None
        found_BM3 = surprise(logp_BMV, tokens_BM.to(self.device)).masked_fill((sampling.temperature_B == 0)[:, None, None], 0)
        return found_BM3.tolist()

    def _text(self, tokens: list[int]) -> str:
        return self.target.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class _Clock:
    """perf_counter; waits for the device first where the phases of a round are to be told apart."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def __call__(self) -> float:
        if self.device is not None:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
