"""Initial weights with which a draft head's attention copies: an induction head (arXiv 2209.11895), built instead of waited for.

    … x_s  x_{s+1} … x_t  x_{t+1}      query of slot t: the token fed, x_{t+1}      key of slot s: the token at s, read off its tapped state
                                       where both are the same token: value of slot s = the token after it, as a draft

Copying from the context is much of what can be drafted, and a head learns to match tokens across two spaces (embeddings and tapped states)
only from much data (figures with and without: benchmarks/RESULTS.md). Matches use the slow rotary dimensions, so that up to some hundred
tokens the distance hardly counts. All other weights stay random, and everything is trained.

Shape suffixes: N sampled slots, H hidden, X taps · H, M copying key/value heads, G query heads per key/value head, C dimensions
of a head that match, D head dimension, U draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.layers import Attention

REACH = 256  # tokens over which a matching dimension may turn by at most one radian
SCORE = 20.0  # attention score of a match; others have about 0 ± SCORE / √C
GAIN = 1.7  # rms of the copied token's draft, where the state that it is added to has about 1
RIDGE = 1e-2
ROWS = 4096  # of a table that are in float64 at a time


def slots_wanted(hidden: int) -> int:
    """How many slots the regression from taps to tokens wants."""
    return max(16384, 8 * hidden)


@torch.no_grad()
def induction_init(
    attention: Attention, fc: nn.Linear, inv_freq: Tensor, tap_NH: Tensor, tokens_NH: Tensor, taps_NX: Tensor, tables: tuple[Tensor, Tensor] | None
) -> None:
    """Set fc and attention in place. Random directions come from torch's global generator.

    tap_NH: the lowest tap as fc reads it, at some slots; tokens_NH: the normed embedding of the token at each (not of the one fed there).
    taps_NX: all that fc reads, at a few hundred slots. tables: normed embedding and lm_head row of each draft token, both [U, H]; None where
    the target ties them. inv_freq [D/2]: the rotary frequencies.
    """
    H, D, G = fc.out_features, attention.head_dim, attention.groups
    pairs = min(D // 2, max(2, int((inv_freq <= 1 / REACH).sum()), D // 8))
    slow = torch.arange(D // 2 - pairs, D // 2)
    dims_C = torch.cat([slow, slow + D // 2])
    C = len(dims_C)
    M = max(1, min(attention.kv_heads, H // (4 * C), H // D))
    # match: what of an embedding names the token, for each head; slot_token: an orthonormal basis of the part of g that holds it.
    match_HMC, value_HMD, slot_token_HMC = (_orthonormal(H, n).to(fc.weight.device) for n in (M * C, M * D, M * C))

    # fc: that part of g reads the lowest tap and nothing else. Without norms before fc the rest would drown it.
    weight_HX = fc.weight.double()
    weight_HX -= slot_token_HMC @ (slot_token_HMC.T @ weight_HX)
    weight_HX /= (taps_NX.double() @ weight_HX.T).square().mean(-1).sqrt().median().clamp(min=1)
    weight_HX[:, :H] += slot_token_HMC @ _regress(tap_NH, tokens_NH.double() @ match_HMC).T
    fc.weight.copy_(weight_HX)

    # Queries: the token fed; keys: that part of g; values: the token fed; outputs: its row of lm_head, as far as M·D dimensions tell it.
    sharpness = (SCORE * D**0.5 / C) ** 0.5
    rotation_HH = _procrustes(*tables) if tables is not None else None
    draft_HMD = (value_HMD if rotation_HH is None else rotation_HH @ value_HMD) * (GAIN * (H / (M * D)) ** 0.5)
    attention.v_proj.weight[: M * D, :H] += value_HMD.T.to(fc.weight)
    for m in range(M):
        of_head = slice(m * C, (m + 1) * C)
        attention.k_proj.weight[m * D + dims_C] = 0
        attention.k_proj.weight[m * D + dims_C, H:] = sharpness * slot_token_HMC[:, of_head].T.to(fc.weight)
        for g in range(m * G, (m + 1) * G):
            attention.q_proj.weight[g * D + dims_C] = 0
            attention.q_proj.weight[g * D + dims_C, :H] = sharpness * match_HMC[:, of_head].T.to(fc.weight)
            attention.o_proj.weight[:, g * D : (g + 1) * D] += (draft_HMD[:, m * D : (m + 1) * D] / G).to(fc.weight)


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Random orthonormal columns. All fits are in float64: what is rounded from them hardly depends on the number of threads."""
    return torch.linalg.qr(torch.randn(rows, columns).double())[0]


def _procrustes(x_UH: Tensor, y_UH: Tensor) -> Tensor:
    """The orthogonal map that best takes the rows of x to the directions of those of y, the identity where they don't tell. Least squares is
    closer by distance and worse by what counts, the largest product with a row of lm_head."""
    product_HH = _product(F.normalize(y_UH.float(), dim=-1), x_UH)
    product_HH.diagonal().add_(1e-3 * product_HH.norm() / len(product_HH) ** 0.5)
    u_HH, _, vh_HH = torch.linalg.svd(product_HH)
    return u_HH @ vh_HH


def _regress(x_NX: Tensor, y_NY: Tensor) -> Tensor:
    """Ridge regression: W [X, Y] with x W ≈ y, float64. More columns than rows, or a column of zeros, are no trouble."""
    gram_XX = _product(x_NX, x_NX)
    gram_XX.diagonal().add_(RIDGE * gram_XX.diagonal().mean() + 1e-9)
    return torch.linalg.solve(gram_XX, _product(x_NX, y_NY))


def _product(x_NX: Tensor, y_NY: Tensor) -> Tensor:
    """xᵀ y in float64, ROWS rows at a time."""
    total_XY = torch.zeros(x_NX.shape[1], y_NY.shape[1], dtype=torch.float64, device=x_NX.device)
    for x, y in zip(x_NX.split(ROWS), y_NY.split(ROWS), strict=True):
        total_XY.addmm_(x.double().T, y.double())
    return total_XY
