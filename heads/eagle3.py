"""EAGLE-3 and EAGLE-3.1: one decoder layer that reads the target's tapped states and the next token, and feeds on its own output.

    features f_t ─ RMSNorm per tap (3.1) ─ fc ─► g ─┐
    token x_{t+1} ─ target's embedding ───────► e ─┴► layer: cat[RMS(e); RMS(g)] → attention, SwiGLU ─► out ─ norm ─ lm_head ─► q(x_{t+2})
                                                        └ fed back as the next step's g: out (EAGLE-3) or norm(out) (3.1)

Slot t holds the pair (f_t, x_{t+1}) at RoPE position t. Unroll step j feeds x_{t+1+j} at slot t and position t+j; its query attends to the
step-0 keys of slots s ≤ t of its document (real features: what decoding has after a verify) and to the keys of its own slot from
steps 1 … j (what decoding drafted since). Training and drafting use the same layer functions.

EAGLE-3: arXiv 2503.01840. EAGLE-3.1: arXiv 2605.09992. Names and shapes of the weights are those that engines load (midlayer.*, fc, norm,
lm_head, d2t, t2d, fc_norm.{i}); the residual is the un-normed g (vLLM's norm_before_residual: false).

Shape suffixes: B rows, T slots, J unroll steps, M new pairs, F feature width (taps · H), H hidden (D in base.py), U draft vocabulary, V target's,
X = 2H, K key/value heads, G query heads per key/value head, D head dimension, W drafted tokens of one level, A drafted tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, DraftHead, Unrolled
from draftheads.heads.induction import induction_init, slots_wanted
from draftheads.heads.layers import (
    BorrowedLinear,
    MidLayer,
    Norm,
    attend_unrolled,
    causal_mask,
    nan_table,
    rope_parameters,
    target_rotary,
)
from draftheads.heads.slots import DraftSlots, descend
from draftheads.heads.vocab import draft_maps
from draftheads.recipes.schema import Geometry, RecipeError, Section


class Eagle3Config(Section):
    """None means: as in the target."""

    type: Literal["eagle3"] = "eagle3"
    taps: tuple[int | Literal["final"], ...] | None = Field(None, description="default 2, L//2, L-3 of the target's L layers")
    draft_vocab_size: int | None = Field(None, ge=1, description="None: the whole vocabulary")
    fc_norm: bool = Field(True, description="EAGLE-3.1: RMSNorm of each tap before fc")
    norm_output: bool = Field(True, description="EAGLE-3.1: feed the normed output back")
    freeze_lm_head: bool = Field(True, description="use the target's lm_head rows; false: train a copy of them")
    induction_init: bool = Field(True, description="start with attention that copies (heads/induction.py); false: all weights random")
    num_layers: Literal[1] = 1
    hidden_size: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    max_positions: int | None = Field(None, ge=1, description="drafting switches off beyond this position")

    def resolve(self, geometry: Geometry) -> Eagle3Config:
        """Fill the target's values in; RecipeError where head and target don't fit."""
        names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        filled = {n: getattr(geometry, n) if getattr(self, n) is None else getattr(self, n) for n in names}
        if filled["hidden_size"] != geometry.hidden_size:
            raise RecipeError(f"head.hidden_size is {filled['hidden_size']}, the target's embedding has {geometry.hidden_size}: leave it out")
        if filled["num_heads"] % filled["num_kv_heads"]:
            raise RecipeError(f"head.num_heads {filled['num_heads']} is not a multiple of head.num_kv_heads {filled['num_kv_heads']}")
        if filled["head_dim"] % 2:
            raise RecipeError(f"head.head_dim must be even for rotary positions, found {filled['head_dim']}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > geometry.vocab_size:
            raise RecipeError(f"head.draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary of {geometry.vocab_size}")
        filled["induction_init"] = self.induction_init and filled["head_dim"] <= filled["hidden_size"]  # narrower states cannot hold a key
        return self.model_copy(update={**filled, "taps": _taps(self.taps, geometry.num_layers)})


def _taps(taps: tuple[int | str, ...] | None, layers: int) -> tuple[int | str, ...]:
    chosen: tuple[int | str, ...] = (2, layers // 2, layers - 3) if taps is None else taps
    numbers = [t for t in chosen if isinstance(t, int)]
    # Rising: engines sort the ids, so that another order would be another head there.
    if not chosen or numbers != sorted(set(numbers)) or any(not 0 <= t < layers for t in numbers) or "final" in chosen[:-1]:
        what = f"the default taps 2, L//2, L-3 = {list(chosen)}" if taps is None else f"taps {list(chosen)}"
        raise RecipeError(f"head.taps: {what} must be distinct, rising and in 0 … {layers - 1} for a target of {layers} layers; "
                          "set head.taps, e.g. " + str(sorted({min(1, layers - 1), layers // 2, layers - 1})))
    return chosen


@dataclass(eq=False)
class Eagle3State:
    """The drafting cache, and what the next draft step starts from.

    fed_BH: the state that the last committed pair feeds to the first draft step; normed_BH: what `logits` turns into its draft.
    Of the draft so far: its last level's states level_BWH, which drafted slots each of them may read (itself included) above_BWA (None while
    the draft is a chain), and how many levels and tokens it has.
    """

    slots: DraftSlots
    fed_BH: Tensor
    normed_BH: Tensor
    level_BWH: Tensor | None = None
    above_BWA: Tensor | None = None
    depth: int = 0
    drafted: int = 0


class Eagle3(DraftHead):
    Config: ClassVar[type[Eagle3Config]] = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__()
        assert config.taps is not None and config.hidden_size is not None, "Eagle3 wants a resolved config: use heads.build_head"
        H, V, eps = config.hidden_size, geometry.vocab_size, geometry.rms_norm_eps
        self.config, self.geometry, self.taps = config, geometry, config.taps
        ids_U = _draft_ids(draft_ids, config.draft_vocab_size, V)
        self.fc_norm = nn.ModuleList(Norm(H, eps) for _ in config.taps) if config.fc_norm else None
        self.fc = nn.Linear(len(config.taps) * H, H, bias=False)
        self.midlayer = MidLayer(H, config.intermediate_size or 0, config.num_heads or 0, config.num_kv_heads or 0, config.head_dim or 0, eps)
        self.norm = Norm(H, eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # a fixed 0.02 would make activations, and chance attention scores, grow with wide inputs
                nn.init.normal_(module.weight, std=min(0.02, module.in_features**-0.5))
        self.lm_head = BorrowedLinear(H, len(ids_U)) if config.freeze_lm_head else nn.Linear(H, len(ids_U), bias=False)
        if not config.freeze_lm_head:
            nn.init.constant_(self.lm_head.weight, float("nan"))
        self.register_buffer("embed_VD", nan_table(V, H), persistent=False)
        d2t_U, t2d_V = draft_maps(ids_U, V)
        self.register_buffer("d2t", d2t_U)
        self.register_buffer("t2d", t2d_V)
        # In a tuple, hence no submodule: .to(bfloat16) would round its frequencies.
        self._rotary = (target_rotary(config.head_dim or 0, geometry),)

    @classmethod
    def build(cls, config: Eagle3Config, geometry: Geometry, draft_ids: Tensor | None) -> Eagle3:
        return cls(config.resolve(geometry), geometry, draft_ids)

    def borrow(self, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        """Borrowed tensors are shared where device and dtype allow. A trained lm_head starts from the target's rows, once: while it is NaN."""
        V, H = self.geometry.vocab_size, self.geometry.hidden_size
        for name, table in (("embedding", embed_VD), ("lm_head", lm_head_VD)):
            if table.shape[1] != H or table.shape[0] < V and name == "lm_head":
                raise RecipeError(f"the target's {name} is {tuple(table.shape)}, the head was built for ({V}, {H})")
        like = self.norm.weight
        # The dtype stays the target's: a second embedding would be the head's largest tensor.
        self.embed_VD = embed_VD.detach().to(like.device)
        whole = len(self.d2t) == len(lm_head_VD)
        rows_UH = lm_head_VD.detach() if whole else lm_head_VD.detach()[self.target_ids_U().to(lm_head_VD.device)]
        if self.config.freeze_lm_head:
            self.lm_head.weight = rows_UH.to(like)
        elif self.lm_head.weight[0].isnan().any():
            with torch.no_grad():
                self.lm_head.weight.copy_(rows_UH)

    def target_ids_U(self) -> Tensor:
        """int64 [U], sorted: the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # ---- the layer, in three pieces that training and drafting share

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Tapped features → g [B, T, H]."""
        return self.fc(self.normed_taps(features_BTF))

    def normed_taps(self, features_BTF: Tensor) -> Tensor:
        features_BTF = features_BTF.to(self.norm.weight.dtype)
        if self.fc_norm is None:
            return features_BTF
        taps = features_BTF.chunk(len(self.taps), -1)
        return torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed_VD).to(self.norm.weight.dtype)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] → cos, sin [B, T, D]."""
        cos, sin = self._rotary[0](self.norm.weight, positions)
        return cos, sin

    def outputs(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """→ (what is fed back, what `logits` reads)."""
        normed = self.norm(out)
        return (normed if self.config.norm_output else out), normed

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states)

    def engine_config(self) -> dict[str, Any]:
        """config.json in the flat layout that vLLM, SGLang and TensorRT-LLM read. Both keys of the tap ids: top level counts like we do,
        eagle_config counts layer outputs (one less)."""
        c, g = self.config, self.geometry
        rope = rope_parameters(g)
        numbers = [t for t in self.taps if isinstance(t, int)]
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim, "vocab_size": g.vocab_size, "draft_vocab_size": len(self.d2t),
            "max_position_embeddings": c.max_positions, "rms_norm_eps": g.rms_norm_eps, "hidden_act": "silu",
            # Never tied: a loader that ties would replace the draft's (U, H) lm_head by the embedding.
            "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bias": False, "norm_before_residual": False,
            "fc_norm": c.fc_norm, "norm_output": c.norm_output, "freeze_lm_head": c.freeze_lm_head,
            "rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else rope, "rope_parameters": rope,
            "num_aux_hidden_states": len(self.taps), "eagle_aux_hidden_state_layer_ids": numbers,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in numbers], "use_aux_hidden_state": True},
            "torch_dtype": str(self.norm.weight.dtype).removeprefix("torch."),
        }

    # ---- training

    @torch.no_grad()
    def fit_start(self, batches: Iterable[DraftBatch]) -> None:
        """Unless induction_init is false. With norm_output: false only the first steps copy well."""
        H, norm, rotary = self.config.hidden_size or 0, self.midlayer.input_layernorm, self._rotary[0]
        if not self.config.induction_init:
            return
        tap: list[Tensor] = []
        tokens: list[Tensor] = []
        taps: list[Tensor] = []
        for batch in batches:
            # The token at slot t is the one that slot t − 1 of the same document was fed.
            here_BT = (batch.documents_BT[:, 1:] >= 0) & (batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1])
            normed_NX = self.normed_taps(batch.features_BTF[:, 1:][here_BT])
            tap.append(normed_NX[:, :H].clone())
            tokens.append(norm(self.embed(batch.tokens_BTJ[:, :-1, 0][here_BT])))
            if sum(map(len, taps)) < 512:
                taps.append(normed_NX)
            if sum(map(len, tap)) >= slots_wanted(H):
                break
        if not any(map(len, tap)):
            return
        tables = None if self.geometry.tie_word_embeddings else (norm(self.embed(self.target_ids_U())), self.lm_head.weight)
        induction_init(self.midlayer.self_attn, self.fc, rotary.inv_freq, torch.cat(tap), torch.cat(tokens), torch.cat(taps), tables)

    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        layer, attention = self.midlayer, self.midlayer.self_attn
        B, T = batch.documents_BT.shape
        cos_JBTD, sin_JBTD = self.cos_sin(step_positions(batch.positions_BT, steps).flatten(0, 1))
        cos_JBTD, sin_JBTD = cos_JBTD.view(steps, B, T, -1), sin_JBTD.view(steps, B, T, -1)
        mask_BTT = causal_mask(batch.documents_BT)
        g_BTH = self.fuse(batch.features_BTF)
        states: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for j in range(steps):
            x_BTX = layer.inputs(self.embed(batch.tokens_BTJ[..., j]), g_BTH)
            k_BKTD, v_BKTD = attention.key_value(x_BTX, (cos_JBTD[j, :, None], sin_JBTD[j, :, None]))
            keys.append(k_BKTD)
            values.append(v_BKTD)
            q_BKQD = attention.query(x_BTX, (cos_JBTD[j, :, None, None], sin_JBTD[j, :, None, None]))
            out_BTH = layer.finish(attention.output(attend_unrolled(q_BKQD, keys, values, mask_BTT), T), g_BTH)
            g_BTH, normed_BTH = self.outputs(out_BTH)
            states.append(normed_BTH)
        return Unrolled(states)

    # ---- drafting

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> Eagle3State:
        c, like = self.config, self.norm.weight
        slots = DraftSlots(batch, max_len, drafts, c.num_kv_heads or 0, c.head_dim or 0, like, self.cos_sin)
        with torch.inference_mode(False), torch.no_grad():
            last = torch.zeros(2, batch, c.hidden_size or 0, device=like.device, dtype=like.dtype)
        return Eagle3State(slots, last[0], last[1])

    def clear(self, state: Eagle3State, row: int) -> None:
        state.slots.clear(row)

    def move(self, state: Eagle3State, source: int, to: int) -> None:
        state.slots.move(source, to)
        for last_BH in (state.fed_BH, state.normed_BH):
            last_BH[to] = last_BH[source]

    @torch.no_grad()
    def extend(self, state: Eagle3State, features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        """Keys and values of all new pairs; attention, MLP and norm only for each row's last one, whose output drafting starts from."""
        slots = state.slots
        counts = counts_B.tolist() if slots.view is None else None
        if counts is not None:
            longest = max(n + count for n, count in zip(slots.lengths[rows], counts, strict=True))
            if not any(counts):
                return
            if longest > slots.max_len:
                raise ValueError(f"{longest} pairs do not fit a drafting cache of {slots.max_len}")
        state.level_BWH, state.above_BWA, state.depth, state.drafted = None, None, 0, 0
        M = tokens_BM.shape[1]
        g_BMH = self.fuse(features_BMF)
        x_BMX = self.midlayer.inputs(self.embed(tokens_BM), g_BMH)
        slots.write(rows, *self.midlayer.self_attn.key_value(x_BMX, slots.rope(rows, 0, M)), 0)
        slots.advance(rows, counts_B, counts)
        if counts is not None and len(counts) == 1:
            x_B1X, g_B1H = x_BMX[:, counts[0] - 1 : counts[0]], g_BMH[:, counts[0] - 1 : counts[0]]
        else:
            last_B11 = (counts_B.to(g_BMH.device) - 1).clamp(min=0)[:, None, None]
            x_B1X, g_B1H = (t.gather(1, last_B11.expand(-1, 1, t.shape[-1])) for t in (x_BMX, g_BMH))
        cos, sin = slots.rope(rows, -1)
        fed_B1H, normed_B1H = self._attend(state, x_B1X, g_B1H, (cos, sin), rows)
        fed_BH, normed_BH = fed_B1H[:, 0], normed_B1H[:, 0]
        if counts is None or min(counts) == 0:  # a row without news keeps its state
            news_B1 = (counts_B > 0).to(fed_BH.device)[:, None]
            fed_BH = torch.where(news_B1, fed_BH, state.fed_BH[rows])
            normed_BH = torch.where(news_B1, normed_BH, state.normed_BH[rows])
        state.fed_BH[rows] = fed_BH
        state.normed_BH[rows] = normed_BH

    @torch.no_grad()
    def begin(self, state: Eagle3State, rows: slice) -> Tensor:
        state.level_BWH, state.above_BWA, state.depth, state.drafted = state.fed_BH[rows][:, None], None, 0, 0
        return self.logits(state.normed_BH[rows])

    @torch.no_grad()
    def step(self, state: Eagle3State, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        slots, W = state.slots, tokens_BW.shape[1]
        assert state.level_BWH is not None, "step before begin"
        if state.drafted + W > slots.drafts:
            raise ValueError(f"{state.drafted + W} drafted tokens in a drafting cache made for {slots.drafts}")
        chain = W == 1 and state.above_BWA is None
        g_BWH = state.level_BWH if chain else state.level_BWH.gather(1, parents_BW[..., None].expand(-1, -1, state.level_BWH.shape[-1]))
        if not chain:
            state.above_BWA = descend(state.above_BWA, parents_BW, state.drafted)
        x_BWX = self.midlayer.inputs(self.embed(tokens_BW), g_BWH)
        cos_sin = slots.rope(rows, state.depth)
        slots.write(rows, *self.midlayer.self_attn.key_value(x_BWX, cos_sin), state.drafted)
        state.depth, state.drafted = state.depth + 1, state.drafted + W
        state.level_BWH, normed_BWH = self._attend(state, x_BWX, g_BWH, cos_sin, rows)
        return self.logits(normed_BWH)

    def _attend(self, state: Eagle3State, x_BWX: Tensor, g_BWH: Tensor, cos_sin: tuple[Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
        """The layer's output for W tokens whose keys are written already, all at one position → (fed, normed), [B, W, H]."""
        attention = self.midlayer.self_attn
        cos, sin = cos_sin
        q_BKQD = attention.query(x_BWX, (cos[:, :, None], sin[:, :, None]) if cos.dim() == 4 else (cos, sin))
        a_BKQD = state.slots.attend(rows, q_BKQD, state.drafted, state.above_BWA)
        return self.outputs(self.midlayer.finish(attention.output(a_BKQD, x_BWX.shape[1]), g_BWH))


def step_positions(positions_BT: Tensor, steps: int) -> Tensor:
    """RoPE positions [J, B, T]: slot t at step j holds the token of position t + j + 1, whose pair is at t + j."""
    return positions_BT + torch.arange(steps, device=positions_BT.device)[:, None, None]


def _draft_ids(draft_ids: Tensor | None, size: int | None, vocab_size: int) -> Tensor:
    ids_U = torch.arange(size or vocab_size) if draft_ids is None else draft_ids.detach().cpu().long()
    if len(ids_U) != (size or vocab_size):
        raise RecipeError(f"the draft vocabulary has {len(ids_U)} ids, head.draft_vocab_size asks for {size or vocab_size}")
    if not bool((ids_U[1:] > ids_U[:-1]).all()) or int(ids_U[0]) < 0 or int(ids_U[-1]) >= vocab_size:
        raise RecipeError(f"the draft vocabulary's ids must rise and lie in 0 … {vocab_size - 1}")
    return ids_U
