"""A round's step functions as CUDA graphs: captured once per shape, then replayed with one launch instead of hundreds.

    run(key, step, inputs) ─► first time: eager (warms up the kernels) ─► second: capture, replay ─► from then on: copy the inputs in, replay

A step may be captured if everything that changes from round to round comes in as a tensor or lives in a static buffer (key/value slots, their
lengths on the device), and nothing is asked of the device. `key` is all the rest: shapes, slots read, which rows are greedy. Capturing executes
nothing, so that a step with side effects (it commits tokens) happens exactly once a round, captured or not.

If a capture fails, everything is eager from then on, with one warning; `status` says why, and reports print it. Without a GPU there is nothing
to capture: decoding runs the eager path, and the tests replay a traced copy of these very steps.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.sampling import RowSampling

# What is captured takes tensors (or None) and returns a tuple of them.
StepFn = Callable[..., tuple[Tensor | None, ...]]
# Slots that attention reads are rounded up to this: a new graph every so many tokens, and masked slots cost little beside the weights.
VIEW = 512
# Verify widths: drafters that look things up propose another number of tokens each round, and every width is a graph of its own.
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 257)
# Buffers (caches of one batch size and length) that an owner may have at a time.
KEPT = 4


@dataclass
class Captured:
    """inputs: the static tensors that a replay reads; outputs: those that it writes, valid until the next replay of the same key."""

    replay: Callable[[], Any]
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]


@dataclass
class _Owned:
    """What belongs to one owner, and goes with it."""

    kept: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    lent: set[Hashable] = field(default_factory=set)
    captured: dict[Hashable, Captured | None] = field(default_factory=dict)  # None: has run once, eagerly
    forms: dict[Hashable, tuple[bool, tuple[int, ...] | None]] = field(default_factory=dict)  # of drafted trees: `chained`, `widths`


class Graphs:
    """The captured steps of one target. `keep` lends buffers that outlive a decode() call, because the graphs hold their addresses.

    What the tests' traces cannot see, and only a GPU can: streams, the memory that graphs share, and how long tensors live that a graph reads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failure: str | None = None
        self._owned: WeakKeyDictionary[Any, _Owned] = WeakKeyDictionary()
        self._pool: Any = None
        self._stream: Any = None

    @property
    def status(self) -> str:
        """One line for reports."""
        if self.failure is not None:
            return f"eager: capturing failed ({self.failure})"
        return f"CUDA graphs: {sum(c is not None for owned in self._owned.values() for c in owned.captured.values())} captured"

    def view(self, used: int, most: int) -> int:
        """How many slots to read when `used` are in use."""
        return min(most, -(-used // VIEW) * VIEW)

    def width(self, nodes: int) -> int:
        """How many nodes a tree of so many is padded to."""
        return next((w for w in WIDTHS if w >= nodes), nodes)

    def keep(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """The owner's buffer of this key, made at the first call. An owner has at most KEPT; the least recently used goes, with its graphs."""
        owned = self._owned.setdefault(owner, _Owned())
        if key not in owned.kept:
            owned.kept[key] = make()
        owned.kept.move_to_end(key)
        if len(owned.kept) > KEPT:
            owned.kept.pop(next(k for k in owned.kept if k not in owned.lent), None)
        return owned.kept[key]

    def lend(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """`keep` for one user at a time: None until the one who has it gives it back."""
        owned = self._owned.setdefault(owner, _Owned())
        if key in owned.lent:
            return None
        owned.lent.add(key)
        return self.keep(owner, key, make)

    def give_back(self, owner: Any, key: Hashable) -> None:
        self._owned.setdefault(owner, _Owned()).lent.discard(key)

    def run(self, buffer: Any, key: Hashable, step: StepFn, inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """step(*inputs), captured if possible. buffer: the static buffers that the step works on; its graphs live as long as it does. The results
        must be used, or copied, before the next run: graphs share their memory."""
        captured_by_key = self._owned.setdefault(buffer, _Owned()).captured
        if self.failure is not None or key not in captured_by_key:
            captured_by_key.setdefault(key, None)
            return step(*inputs)
        captured = captured_by_key[key]
        if captured is None:
            try:
                captured = captured_by_key[key] = self.capture(step, inputs)
            except Exception as error:  # whatever the driver, torch or the model's code objects to: the eager path is always right
                cause = error.__context__ or error  # ending a capture that failed is an error too, and says less
                self.failure = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
                warnings.warn(f"CUDA graphs are off, decoding goes on eagerly: {self.failure}", stacklevel=2)
                return step(*inputs)
        for static, given in zip(captured.inputs, inputs, strict=True):
            if static is not None and given is not None and static is not given:
                static.copy_(given)
        captured.replay()
        return captured.outputs

    def run_draft(self, buffer: Any, key: Hashable, draft: Callable[..., DraftTree], inputs: Sequence[Tensor | None]) -> DraftTree:
        """`run` for a step that drafts a tree."""
        forms = self._owned.setdefault(buffer, _Owned()).forms

        def step(*given: Tensor | None) -> tuple[Tensor | None, ...]:
            tree = draft(*given)
            forms[key] = (tree.chained, tree.widths)
            return tree.tokens_BN, tree.parents_BN, tree.valid_BN, tree.q_BNV

        tokens_BN, parents_BN, valid_BN, q_BNV = self.run(buffer, key, step, inputs)
        assert tokens_BN is not None and parents_BN is not None and valid_BN is not None
        chained, widths = forms[key]
        # Copies: another drafter may replay its own graph before this tree is verified.
        own_q_BNV = None if q_BNV is None else q_BNV.clone()
        return DraftTree(tokens_BN.clone(), parents_BN.clone(), valid_BN.clone(), own_q_BNV, chained=chained, widths=widths)

    def capture(self, step: StepFn, inputs: Sequence[Tensor | None]) -> Captured:
        """Record one execution of the step on copies of its inputs, without executing it."""
        static = tuple(None if t is None else t.clone() for t in inputs)
        # The current device need not be this one, and a capture that fails must not leave us on its stream.
        with torch.cuda.device(self.device):
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self.device)
            with torch.cuda.stream(torch.cuda.current_stream(self.device)), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outputs = step(*static)
        return Captured(graph.replay, static, outputs)


def kind(sampling: RowSampling) -> Hashable:
    """What a captured step knows of the rows' sampling, its temperatures left out: part of a key."""
    return all(sampling.greedy), any(sampling.greedy), replace(sampling, temperature_B=None, greedy=())  # type: ignore[arg-type]
