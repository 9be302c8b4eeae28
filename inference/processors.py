"""Processors that look at what was written: repetition penalty, no-repeat n-gram, minimum length, in transformers' order and meaning.

In a tree each node has a history of its own: the row's tokens up to the root, then the drafted tokens on the path to the node.
`process` takes the target's raw logits at all nodes at once and does for each node what transformers does for that history.

    start (prompt) ─► process (prefill's logits) ─► extend (first token) ─► [ process (a tree's logits) ─► extend (the new tokens) ] …

All of it stays on the device. The largest things made are [B,N,V], like the logits, and [B,N,S].

Shape suffixes: B rows, N tree nodes, S history (max_len), M tokens of a round (padded), V vocabulary, K context of an n-gram (its size − 1).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.requests import Sampling


def wanted(sampling: Sampling) -> bool:
    """Does anything here have work to do?"""
    return sampling.repetition_penalty != 1 or sampling.no_repeat_ngram_size > 0 or sampling.min_new_tokens > 0


class History:
    """The tokens of every slot, prompt included. Slots: as in Drafter, the active rows are a prefix.

    batch: slots. max_len: most tokens a row can have. vocab_size: V of the logits (ids beyond it are legal in prompts). eos_ids: what
    min_new_tokens forbids; empty if nothing ends an answer.
    """

    def __init__(self, batch: int, max_len: int, vocab_size: int, eos_ids: Iterable[int], sampling: Sampling, device: torch.device | str) -> None:
        self.sampling, self.max_len = sampling, max_len
        # One column more than tokens, for what is beyond a full row. What lies beyond a row's length is garbage that nobody looks at.
        self.ids_BS = torch.zeros(batch, max_len + 1, dtype=torch.int64, device=device)
        self.lengths_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.prompts_B = torch.zeros_like(self.lengths_B)  # how many of them are the prompt's
        self.eos_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.eos_V[torch.tensor([i for i in eos_ids if i < vocab_size], dtype=torch.int64, device=device)] = True

    def start(self, row: int, prompt_T: Tensor) -> None:
        """A new prompt in slot `row`: int64 [T]. Its first token is told by `extend`."""
        self.ids_BS[row, : len(prompt_T)] = prompt_T
        self.lengths_B[row] = self.prompts_B[row] = len(prompt_T)

    def move(self, source: int, to: int) -> None:
        """Row `source` now lives in slot `to`."""
        for state in (self.ids_BS, self.lengths_B, self.prompts_B):
            state[to] = state[source]

    def extend(self, tokens_BM: Tensor, counts_B: Tensor, rows: slice | None = None) -> None:
        """The rows in these slots (default: 0 … B−1) got their first counts_B tokens of tokens_BM. int64 both."""
        rows = slice(0, len(counts_B)) if rows is None else rows
        lengths_B = self.lengths_B[rows]
        at_BM = lengths_B[:, None] + torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
        self.ids_BS[rows].scatter_(1, at_BM.clamp(max=self.max_len), tokens_BM)
        lengths_B += counts_B

    def process(self, logits_BNV: Tensor, tree: DraftTree, rows: slice) -> Tensor:
        """float32 [B,N,V] raw logits of the rows in these slots -> the same, processed; forbidden tokens are −inf. Node 0 is the newest
        token of the history; every other node adds the tokens on its path. What padding nodes get means nothing."""
        lengths_B, ids_BS = self.lengths_B[rows], self.ids_BS[rows, : self.max_len]
        ancestors_BNN = tree.ancestors_BNN()
        depths_BN = ancestors_BNN.sum(-1) - 1
        penalty, size = self.sampling.repetition_penalty, self.sampling.no_repeat_ngram_size
        if penalty != 1:
            seen_BNV = _seen(logits_BNV, tree, ancestors_BNN, ids_BS, lengths_B)
            logits_BNV = torch.where(seen_BNV, torch.where(logits_BNV < 0, logits_BNV * penalty, logits_BNV / penalty), logits_BNV)
        if size > 0:
            banned_BNV = _banned(logits_BNV, tree, ancestors_BNN, depths_BN, ids_BS, lengths_B, size)
            logits_BNV = logits_BNV.masked_fill(banned_BNV, float("-inf"))
        if self.sampling.min_new_tokens > 0:
            written_BN = (lengths_B - self.prompts_B[rows])[:, None] + depths_BN
            early_BN1 = (written_BN < self.sampling.min_new_tokens)[..., None]
            logits_BNV = logits_BNV.masked_fill(early_BN1 & self.eos_V, float("-inf"))
        return logits_BNV


def _seen(logits_BNV: Tensor, tree: DraftTree, ancestors_BNN: Tensor, ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
    """bool [B,N,V]: tokens that are in the node's history."""
    B, N, V = logits_BNV.shape
    # Column V takes what does not count: ids beyond the vocabulary, garbage beyond the history, nodes that are not on the path.
    inside_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device) < lengths_B[:, None]
    row_BV = torch.zeros(B, V + 1, dtype=torch.bool, device=ids_BS.device).scatter_(1, torch.where(inside_BS, ids_BS, V).clamp(max=V), True)
    path_BNN = torch.where(ancestors_BNN, tree.tokens_BN[:, None, :], V).clamp(max=V)
    return row_BV[:, None].repeat(1, N, 1).scatter_(2, path_BNN, True)[..., :V]


def _banned(logits_BNV: Tensor, tree: DraftTree, ancestors_BNN: Tensor, depths_BN: Tensor, ids_BS: Tensor, lengths_B: Tensor, size: int) -> Tensor:
    """bool [B,N,V]: tokens that would complete an n-gram of this size which is in the node's history already.

    A token at place t of a history bans itself at a node if the size − 1 tokens before t are the node's newest ones. t is either in the
    row's own history or a drafted node on the path, whose context is its parent's.
    """
    B, N, V = logits_BNV.shape
    S = ids_BS.shape[1]
    context_BNK = _contexts(tree, depths_BN, ids_BS, lengths_B, size - 1)
    index_S = torch.arange(S, device=ids_BS.device)
    same_BNS = ((index_S >= size - 1) & (index_S < lengths_B[:, None]))[:, None].repeat(1, N, 1)
    for k in range(min(size - 1, S)):
        # Column k is k + 1 tokens back.
        same_BNS[..., k + 1 :] &= ids_BS[:, None, : S - k - 1] == context_BNK[..., k, None]
    spare = torch.full((), V, device=ids_BS.device)
    banned_BNV = torch.zeros(B, N, V + 1, dtype=torch.bool, device=ids_BS.device)
    banned_BNV.scatter_(2, torch.where(same_BNS, ids_BS[:, None], spare).clamp(max=V), True)
    # Near the start of a text a parent's context has a −1 where any deeper node has a token: no match, as it should be.
    before_BNK = context_BNK.gather(1, tree.parents_BN.clamp(min=0)[..., None].expand(-1, -1, size - 1))
    same_BNN = ancestors_BNN & (depths_BN > 0)[:, None]
    for k in range(size - 1):
        same_BNN = same_BNN & (before_BNK[:, None, :, k] == context_BNK[..., k, None])
    return banned_BNV.scatter_(2, torch.where(same_BNN, tree.tokens_BN[:, None], spare).clamp(max=V), True)[..., :V]


def _contexts(tree: DraftTree, depths_BN: Tensor, ids_BS: Tensor, lengths_B: Tensor, K: int) -> Tensor:
    """int64 [B,N,K]: the newest token of the node's history (its own), the one before it, … Where the history is shorter: −1."""
    context = []
    node_BN = torch.arange(tree.width, device=ids_BS.device).expand_as(depths_BN)
    for k in range(K):
        place_BN = lengths_B[:, None] - 1 + depths_BN - k
        written_BN = ids_BS.gather(1, place_BN.clamp(min=0, max=ids_BS.shape[1] - 1))
        drafted_BN = tree.tokens_BN.gather(1, node_BN.clamp(min=0))
        # Above the root (node 0) the parent is −1: from there on the row's own history speaks.
        token_BN = torch.where(depths_BN > k, drafted_BN, written_BN)
        context.append(torch.where(place_BN >= 0, token_BN, -1))
        node_BN = torch.where(node_BN > 0, tree.parents_BN.gather(1, node_BN.clamp(min=0)), node_BN)
    return torch.stack(context, -1) if K else depths_BN.new_zeros(*depths_BN.shape, 0)
