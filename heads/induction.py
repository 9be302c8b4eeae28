"""Initial weights with which a draft head's attention copies: an induction head (arXiv 2209.11895), built instead of waited for.

    … x_s  x_{s+1} … x_t  x_{t+1}      query of slot t: the token fed, x_{t+1}      key of slot s: the token at s, read off its tapped state
                                       where both are the same token: value of slot s = the token after it, as a draft

Copying from the prompt is much of what can be drafted, and a head learns to match tokens across two spaces (embeddings and tapped states)
only from much data: after 49k answer tokens of SmolLM2-135M, 0.46 of the first drafts are right with this start and 0.34 without
(benchmarks/RESULTS.md). Matches use the slow rotary dimensions, so that distance hardly counts. All other weights stay random, and
everything is trained.

Shape suffixes: N sampled slots, H hidden, M copying key/value heads, C dimensions of a head that match, D head dimension, U draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.layers import Attention

REACH = 256  # tokens over which a matching dimension may turn by at most one radian
SCORE = 20.0  # attention score of a match; others have about 0 ± SCORE / √C
GAIN = 1.7  # rms of the copied token's draft, where the state that it is added to has about 1
RIDGE = 1e-3
SAMPLE = 16384  # slots, and tokens of the draft vocabulary, that the two fits read


@torch.no_grad()
def induction_init(
    attention: Attention, fc: nn.Linear, inv_freq: Tensor, tap_NH: Tensor, tokens_NH: Tensor, vocab_UH: Tensor, lm_head_UH: Tensor
) -> None:
    """Set fc and attention in place. Random directions come from torch's global generator.

    tap_NH: the lowest tap as fc reads it, at some slots; tokens_NH: the normed embedding of the token at each (not of the one fed there).
    vocab_UH, lm_head_UH: normed embedding and lm_head row of each draft token. inv_freq [D/2]: the rotary frequencies.
    """
    H, D, G = fc.out_features, attention.head_dim, attention.groups
    pairs = max(2, int((inv_freq <= 1 / REACH).sum()), D // 8)
    slow = torch.arange(D // 2 - pairs, D // 2)
    dims_C = torch.cat([slow, slow + D // 2])
    C = len(dims_C)
    M = max(1, min(attention.kv_heads, H // (4 * C), H // D))
    device = fc.weight.device
    match_HMC, value_HMD, place_HMC = (_orthonormal(H, n).to(device) for n in (M * C, M * D, M * C))

    # fc: a part of g, otherwise untouched by the taps, holds the token at the slot.
    weight_HX = fc.weight.double()
    weight_HX -= place_HMC @ (place_HMC.T @ weight_HX)
    weight_HX[:, :H] += place_HMC @ (_regress(tap_NH, tokens_NH) @ match_HMC).T
    fc.weight.copy_(weight_HX)

    # Queries: the token fed; keys: that part of g; values: the token fed; outputs: its row of lm_head, as far as M·D dimensions tell it.
    sharpness = (SCORE * D**0.5 / C) ** 0.5
    draft_HMD = _rotation(vocab_UH, lm_head_UH) @ value_HMD * (GAIN * (H / (M * D)) ** 0.5)
    attention.v_proj.weight[: M * D, :H] += value_HMD.T.to(fc.weight)
    for m in range(M):
        of_head = slice(m * C, (m + 1) * C)
        attention.k_proj.weight[m * D + dims_C, H:] = sharpness * place_HMC[:, of_head].T.to(fc.weight)
        for g in range(m * G, (m + 1) * G):
            attention.q_proj.weight[g * D + dims_C, :H] = sharpness * match_HMC[:, of_head].T.to(fc.weight)
            attention.o_proj.weight[:, g * D : (g + 1) * D] += (draft_HMD[:, m * D : (m + 1) * D] / G).to(fc.weight)


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Random orthonormal columns, float64: what is rounded from it later is the same for every number of threads."""
    return torch.linalg.qr(torch.randn(rows, columns).double())[0]


def _rotation(x_NH: Tensor, y_NH: Tensor) -> Tensor:
    """The orthogonal map that best takes the rows of x to the directions of those of y (Procrustes), the identity where they don't tell: for
    tied embeddings the identity altogether. Least squares does better by distance and worse by what counts, the largest product: 0.18 of
    the drafts of a fresh head right against 0.27."""
    product_HH = F.normalize(y_NH.double(), dim=-1).T @ x_NH.double()
    product_HH.diagonal().add_(RIDGE * product_HH.norm() / len(product_HH) ** 0.5)
    u_HH, _, v_HH = torch.linalg.svd(product_HH)
    return u_HH @ v_HH


def _regress(x_NX: Tensor, y_NY: Tensor) -> Tensor:
    """Ridge regression: W [X, Y] with x W ≈ y, float64. More columns than rows, or a column of zeros, are no trouble."""
    x_NX, y_NY = x_NX.double(), y_NY.double()
    gram_XX = x_NX.T @ x_NX
    gram_XX.diagonal().add_(RIDGE * gram_XX.diagonal().mean() + 1e-9)
    return torch.linalg.solve(gram_XX, x_NX.T @ y_NY)
