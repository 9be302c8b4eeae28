"""What heads are made of: decoder layers, their attention in training and in drafting, residual blocks, rotary.

Attention has two forms with the same numbers: `attend_unrolled` for all slots of a training batch at one unroll step, `attend_cached` for the
new queries of each row over the drafting cache (heads/slots.py). Query heads that share a key/value head are folded into the query axis; keys are
never repeated.

Shape suffixes: B rows, T slots, H hidden, X what attention reads (2H where it is [embedding; state]), K key/value heads, G query heads per
key/value head, Q = G·T folded queries, D head dimension, S slots of the drafting cache, W drafted tokens of one level.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.recipes.schema import Geometry, RecipeError


class Norm(nn.RMSNorm):
    """Under autocast activations are bfloat16 and the weight is not: without the cast, torch leaves its fused kernel (and says so)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections. Attention itself is in the two functions below: over an unrolled batch, and over the drafting cache."""

    def __init__(self, X: int, H: int, Q: int, K: int, D: int, qk_eps: float | None = None) -> None:
        """X width of the inputs, H hidden, Q query heads, K key/value heads, D head dimension; qk_eps: Qwen3's RMSNorm of queries and keys."""
        super().__init__()
        self.kv_heads, self.head_dim, self.groups = K, D, Q // K
        self.q_proj = nn.Linear(X, Q * D, bias=False)
        self.k_proj = nn.Linear(X, K * D, bias=False)
        self.v_proj = nn.Linear(X, K * D, bias=False)
        self.o_proj = nn.Linear(Q * D, H, bias=False)
        self.q_norm = None if qk_eps is None else Norm(D, qk_eps)
        self.k_norm = None if qk_eps is None else Norm(D, qk_eps)

    def query(self, x_BTX: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """→ [B, K, G·T, D], rotated and scaled by 1/√D: groups are folded into the query axis, so keys are never repeated."""
        B, T, _ = x_BTX.shape
        q_BTKGD = self.q_proj(x_BTX).view(B, T, self.kv_heads, self.groups, self.head_dim)
        if self.q_norm is not None:
            q_BTKGD = self.q_norm(q_BTKGD)
        q_BKGTD = rotate(q_BTKGD.permute(0, 2, 3, 1, 4), cos_sin) * self.head_dim**-0.5
        return q_BKGTD.reshape(B, self.kv_heads, self.groups * T, self.head_dim)

    def key_value(self, x_BTX: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """→ rotated keys and values, [B, K, T, D]."""
        B, T, _ = x_BTX.shape
        k_BTKD = self.k_proj(x_BTX).view(B, T, self.kv_heads, self.head_dim)
        k_BKTD = (k_BTKD if self.k_norm is None else self.k_norm(k_BTKD)).transpose(1, 2)
        v_BKTD = self.v_proj(x_BTX).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(k_BKTD, cos_sin), v_BKTD

    def output(self, out_BKQD: Tensor, T: int) -> Tensor:
        """[B, K, G·T, D] → [B, T, H]."""
        B, K, _, D = out_BKQD.shape
        return self.o_proj(out_BKQD.view(B, K, self.groups, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, K * self.groups * D))


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The decoder layer that reads an embedding and a state; `inputs` → attention → `finish`. norm_before_residual: attention's output is added to
    the normed state, as in heads of speculators, and not to the state itself, as in the paper (arXiv 2503.01840)."""

    def __init__(self, H: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float, *, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = Norm(H, eps)
        self.hidden_norm = Norm(H, eps)
        self.self_attn = Attention(2 * H, H, heads, kv_heads, head_dim)
        self.post_attention_layernorm = Norm(H, eps)
        self.mlp = Mlp(H, inner)

    def inputs(self, e_BTH: Tensor, g_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """→ (what attention reads, [B, T, 2H]; what its output is added to, [B, T, H])"""
        n_BTH = self.hidden_norm(g_BTH)
        return torch.cat([self.input_layernorm(e_BTH), n_BTH], -1), n_BTH if self.norm_before_residual else g_BTH

    def finish(self, attention_BTH: Tensor, r_BTH: Tensor) -> Tensor:
        h_BTH = r_BTH + attention_BTH
        return h_BTH + self.mlp(self.post_attention_layernorm(h_BTH))


class Layer(nn.Module):
    """A Llama (with qk_norm: Qwen3) decoder layer; `inputs` → attention → `finish`. input_norm False: EAGLE-1's, without its first norm."""

    def __init__(self, H: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float, *, qk_norm: bool = False,
                 input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(H, eps) if input_norm else None
        self.self_attn = Attention(H, H, heads, kv_heads, head_dim, eps if qk_norm else None)
        self.post_attention_layernorm = Norm(H, eps)
        self.mlp = Mlp(H, inner)

    def inputs(self, h_BTH: Tensor) -> Tensor:
        return h_BTH if self.input_layernorm is None else self.input_layernorm(h_BTH)

    def finish(self, attention_BTH: Tensor, h_BTH: Tensor) -> Tensor:
        h_BTH = h_BTH + attention_BTH
        return h_BTH + self.mlp(self.post_attention_layernorm(h_BTH))


class ResBlock(nn.Module):
    """Medusa's: x + SiLU(Wx + b), W and b zero at first, so that it begins as the identity (arXiv 2401.10774)."""

    def __init__(self, H: int) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class BorrowedLinear(nn.Linear):
    """A Linear whose weight belongs to the target: a non-persistent buffer, NaN until it is lent."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")
        del self.weight
        self.register_buffer("weight", nan_table(outputs, inputs), persistent=False)


def lm_head(H: int, U: int, *, frozen: bool, bias: bool = False) -> nn.Linear:
    """The target's rows, borrowed, or a copy of them to be trained: NaN until `borrow_rows`. bias: of the copy, zeros at first."""
    if frozen:
        return BorrowedLinear(H, U)
    layer = nn.Linear(H, U, bias=bias)
    nn.init.constant_(layer.weight, float("nan"))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def borrow_rows(layer: nn.Linear, rows_UH: Tensor, like: Tensor) -> None:
    """Lend the target's rows to an `lm_head`: shared where device and dtype allow, or copied, once, into one that is trained."""
    if isinstance(layer, BorrowedLinear):
        layer.weight = rows_UH.to(like)
    elif layer.weight[0].isnan().any():
        with torch.no_grad():
            layer.weight.copy_(rows_UH)


def borrow_embedding(head: nn.Module, embed_VD: Tensor, like: Tensor) -> None:
    """The dtype stays the target's: a second embedding would be the head's largest tensor."""
    expected = head.get_buffer("embed_VD").shape[1]
    if embed_VD.shape[1] != expected:
        raise RecipeError(f"the target's embedding is {tuple(embed_VD.shape)}, the head was built for a width of {expected}")
    head.embed_VD = embed_VD.detach().to(like.device)


def nan_table(*shape: int) -> Tensor:
    """NaN of this shape in the memory of one number."""
    return torch.full((1,) * len(shape), float("nan")).expand(shape)


def rotate(x_TD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions; cos and sin broadcast against x [..., T, D]."""
    cos, sin = cos_sin
    left, right = x_TD.chunk(2, -1)
    return x_TD * cos + torch.cat([-right, left], -1) * sin


def over_groups(cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """DraftSlots.rope's, [T, D] or [B, 1, T, D], made to multiply queries [B, K, G, T, D] with."""
    cos, sin = cos_sin
    return (cos[:, :, None], sin[:, :, None]) if cos.dim() == 4 else (cos, sin)


def attend_unrolled(q_BKQD: Tensor, keys: list[Tensor], values: list[Tensor], mask_BTT: Tensor) -> Tensor:
    """Queries of step j against the step-0 keys (causal, [T,T] scores) and the own-slot keys of steps 1 … j (one column each).

    keys, values: j+1 tensors [B, K, T, D]. mask_BTT: additive float32, 0 or −inf. One float32 softmax over all T + j columns.
    """
    B, K, Q, D = q_BKQD.shape
    T = keys[0].shape[2]
    own_BKGTD = q_BKQD.view(B, K, Q // T, T, D)
    scores_BKGTT = (q_BKQD @ keys[0].transpose(-1, -2)).float().view(B, K, Q // T, T, T) + mask_BTT[:, None, None]
    columns = [(own_BKGTD * k_BKTD[:, :, None]).sum(-1, keepdim=True).float() for k_BKTD in keys[1:]]
    p = torch.softmax(torch.cat([scores_BKGTT, *columns], -1), -1).to(values[0].dtype)
    out_BKQD = p[..., :T].reshape(B, K, Q, T) @ values[0]
    for i, v_BKTD in enumerate(values[1:]):
        out_BKQD = out_BKQD + (p[..., T + i, None] * v_BKTD[:, :, None]).view(B, K, Q, D)
    return out_BKQD


def attend_cached(q_BKQD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, mask_BWS: Tensor | None) -> Tensor:
    """W queries per row (folded, Q = G·W) against the cache. mask_BWS: True where query w may read the slot (W or 1 wide), None: all."""
    scores_BKQS = (q_BKQD @ keys_BKSD.transpose(-1, -2)).float()
    if mask_BWS is not None:
        B, K, Q, S = scores_BKQS.shape
        scores_BKGWS = scores_BKQS.view(B, K, -1, mask_BWS.shape[1], S).masked_fill(~mask_BWS[:, None, None], float("-inf"))
        scores_BKQS = scores_BKGWS.view(B, K, Q, S)
    return torch.softmax(scores_BKQS, -1).to(values_BKSD.dtype) @ values_BKSD


def causal_mask(documents_BT: Tensor) -> Tensor:
    """Additive float32 [B, T, T]: 0 where slot t may read slot s ≤ t of its own document, else −inf. Padding reads padding, so no row is empty."""
    T = documents_BT.shape[1]
    allowed_BTT = (documents_BT[:, :, None] == documents_BT[:, None]).tril()
    return torch.zeros(len(documents_BT), T, T, device=documents_BT.device).masked_fill_(~allowed_BTT, float("-inf"))


def target_rotary(head_dim: int, geometry: Geometry) -> Any:
    """transformers' own rotary, so that llama3, yarn and the other scalings are the target's."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    # One head as wide as the model: only head_dim counts here, and LlamaConfig refuses a hidden size that is no multiple of the heads.
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=head_dim, num_attention_heads=1, num_key_value_heads=1, head_dim=head_dim,
                    max_position_embeddings=geometry.max_positions, rope_parameters=rope_parameters(geometry))
    )


def rope_parameters(geometry: Geometry) -> dict[str, Any]:
    """The rotary parameters of the head: the target's, of its full-attention layers where they differ by layer, over the whole head_dim
    (the engines' llama layer knows no partial rotation)."""
    found = dict(geometry.rope_parameters)
    if "rope_theta" not in found:
        layered = [v for v in (found.get("full_attention"), *found.values()) if isinstance(v, dict) and "rope_theta" in v]
        found = dict(layered[0]) if layered else found
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", 10000.0)
    found.pop("partial_rotary_factor", None)
    found.pop("mrope_section", None)
    return found
