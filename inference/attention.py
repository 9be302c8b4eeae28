"""Attention over the slot cache without repeat_kv: the query heads that share a key/value head are folded into the query axis.

Stock SDPA with a mask expands the whole cache to all query heads in every layer, which costs more than the attention itself. Here a key/value
head meets its G query heads as one query of G·T rows. The function is registered with transformers' AttentionInterface under `NAME` and
selected by `use_attention` for the duration of one forward, so the model's own attention stays what it was outside.

`NAME` has no entry among transformers' mask functions: that is how a mask of None reaches us as None (transformers would otherwise build one).
None means: T = 1 and every slot of the view counts, or plain causal attention over exactly T slots.

Shape suffixes: B rows, H query heads, K key/value heads, G = H/K, T new tokens, S slots of the view, D head dimension, A tokens of a tree
behind the committed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from draftheads.heads.slots import behind_mask

NAME = "draftheads_folded"
# Up to here the mask is folded too (float, G·T·S); beyond it, a bool mask is shared by G calls, so that a long prefill stays small.
FOLD_TOKENS = 64


def folded_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature. The mask is what `fold_mask` made, or None (see above). Returns [B, T, H, Dv] and None."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:  # dropping one would be silently wrong
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    B, H, T, D = query_BHTD.shape
    K = key_BKSD.shape[1]
    G = H // K
    mask = attention_mask
    if mask is None and T > 1:
        out_BHTD = F.scaled_dot_product_attention(query_BHTD, key_BKSD, value_BKSD, is_causal=True, scale=scaling, enable_gqa=G > 1)
    elif mask is not None and mask.dtype == torch.bool:
        out_BHTD = query_BHTD.new_empty(B, H, T, value_BKSD.shape[-1])
        for g in range(G):
            out_BHTD[:, g::G] = F.scaled_dot_product_attention(query_BHTD[:, g::G], key_BKSD, value_BKSD, mask, scale=scaling)
    else:
        if mask is not None and mask.shape[2] not in (1, G * T):  # folded for other layers' grouping
            mask = mask[:, :, :T].repeat(1, 1, G, 1)
        query_BKRD = query_BHTD.reshape(B, K, G * T, D)
        out_BHTD = F.scaled_dot_product_attention(query_BKRD, key_BKSD, value_BKSD, mask, scale=scaling).view(B, H, T, -1)
    return out_BHTD.transpose(1, 2), None


AttentionInterface.register(NAME, folded_attention)


def fold_mask(mask_BTS: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """bool [B,T,S] (True = attend) -> what `folded_attention` takes: additive [B,1,G·T,S], or the bool mask itself for long T."""
    T = mask_BTS.shape[1]
    if T > FOLD_TOKENS:
        return mask_BTS[:, None]
    added_BTS = float_mask(mask_BTS, dtype)
    return (added_BTS if T == 1 or groups == 1 else added_BTS.repeat(1, groups, 1))[:, None]


def float_mask(mask_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """bool -> additive: 0 where attended, the dtype's minimum elsewhere (−inf turns a fully masked row into NaN). Eager attention adds
    its mask, so a bool mask there would be silently wrong."""
    return torch.zeros(mask_BTS.shape, dtype=dtype, device=mask_BTS.device).masked_fill_(~mask_BTS, torch.finfo(dtype).min)


@contextmanager
def use_attention(config: Any, name: str | None) -> Iterator[None]:
    """Select an attention implementation for one forward (layers read it from their config); None leaves the model's own."""
    if name is None:
        yield
        return
    # The private name: the public setter walks over sub-configs, and this runs for every forward.
    before = config._attn_implementation_internal
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def block_mask(start_B: Tensor, view: int, block_BTA: Tensor | None, tokens: int) -> Tensor:
    """bool [B,T,S]: each of T new tokens sees its row's committed slots (< start) and, of the A tokens behind them, those marked.

    block_BTA bool: ancestors in a tree, itself included; None: causal, A = T. Token a of row b lies in slot start_B[b] + a.
    """
    index_S = torch.arange(view, device=start_B.device)
    if block_BTA is None:
        return index_S - start_B[:, None, None] <= torch.arange(tokens, device=start_B.device)[:, None]
    return behind_mask(start_B, index_S, block_BTA)


def level_mask(length_B: Tensor, view: int, above_BTA: Tensor | None, drafted: int) -> Tensor:
    """bool [B, T, S = view] for the newest T of `drafted` tokens behind the committed slots (< length): all of these and, of the drafted tokens,
    those that above_BTA [B, T, A = drafted] marks (None: all, T = 1)."""
    all_B1A = length_B.new_ones(len(length_B), 1, drafted, dtype=torch.bool)
    return block_mask(length_B, view, all_B1A if above_BTA is None else above_BTA, 1)


def window_mask(mask_BTS: Tensor, positions_BT: Tensor, start_B: Tensor, window: int) -> Tensor:
    """The same mask for a sliding layer: only slots whose *position* is less than `window` behind. In a tree, slot and position differ."""
    B, T, S = mask_BTS.shape
    position_BS = torch.arange(S, device=mask_BTS.device).repeat(B, 1)
    slot_BT = start_B[:, None] + torch.arange(T, device=mask_BTS.device)
    position_BS.scatter_(1, slot_BT, positions_BT)
    return mask_BTS & (positions_BT[:, :, None] - position_BS[:, None] < window)
