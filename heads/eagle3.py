"""EAGLE-3 and EAGLE-3.1: one decoder layer that reads the target's tapped states and the next token, and feeds on its own output.

    features f_t ─ RMSNorm per tap (3.1) ─ fc ─► g ─┐
    token x_{t+1} ─ target's embedding ───────► e ─┴► layer: cat[RMS(e); RMS(g)] → attention, SwiGLU ─► out ─ norm ─ lm_head ─► q(x_{t+2})
                                                        └ fed back as the next step's g: out (EAGLE-3) or norm(out) (3.1)

Published heads have other forms, which are options here, off by default: a norm over all taps at once (norm_before_fc), a bias of fc (fc_bias), and
attention's output added to RMS(g) instead of g (norm_before_residual).

heads/feedback.py has the rest: slots, the unrolled loop, drafting.

EAGLE-3: arXiv 2503.01840. EAGLE-3.1: arXiv 2605.09992. Names and shapes of the weights are those that engines load (midlayer.*, fc, norm,
lm_head, d2t, t2d, fc_norm.{i}, input_norm).

Shape suffixes: B rows, T slots, F feature width (taps · H), H hidden, U draft vocabulary, N sampled slots, X = F.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, Unrolled
from draftheads.heads.config import LayerConfig, Tap
from draftheads.heads.feedback import FeedbackHead, step_positions
from draftheads.heads.induction import induction_init, slots_wanted
from draftheads.heads.layers import MidLayer, Norm
from draftheads.recipes.schema import Geometry, RecipeError


class Eagle3Config(LayerConfig):
    """taps: by default 2, L//2, L-3 of the target's L layers."""

    type: Literal["eagle3"] = "eagle3"
    fc_norm: bool = Field(True, description="EAGLE-3.1: RMSNorm of each tap before fc")
    norm_output: bool = Field(True, description="EAGLE-3.1: feed the normed output back")
    norm_before_fc: bool = Field(False, description="one RMSNorm over all taps together, instead of fc_norm (first heads of gpt-oss)")
    norm_before_residual: bool = Field(False, description="the layer adds to its normed state, as speculators' heads do")
    fc_bias: bool = Field(False, description="SGLang and TensorRT-LLM only: vLLM's fc has none")
    induction_init: bool = Field(True, description="start with attention that copies (heads/induction.py); false: all weights random")
    num_layers: Literal[1] = 1

    def default_taps(self, geometry: Geometry) -> tuple[Tap, ...]:
        L = geometry.num_layers
        return (2, L // 2, L - 3)

    def resolve(self, geometry: Geometry) -> Eagle3Config:
        found = super().resolve(geometry)
        if self.fc_norm and self.norm_before_fc:
            raise RecipeError("head.fc_norm and head.norm_before_fc would norm the taps twice: set one of them to false (fc_norm is true by default)")
        fits = (found.head_dim or 0) <= (found.hidden_size or 0)  # narrower states cannot hold a key
        return found.model_copy(update={"induction_init": self.induction_init and fits})


class Eagle3(FeedbackHead):
    Config: ClassVar[type[Eagle3Config]] = Eagle3Config

    def __init__(self, config: Eagle3Config, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__(config, geometry, draft_ids)
        H, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.fc_norm = nn.ModuleList(Norm(H, eps) for _ in self.taps) if config.fc_norm else None
        self.input_norm = Norm(len(self.taps) * H, eps) if config.norm_before_fc else None
        self.fc = nn.Linear(len(self.taps) * H, H, bias=config.fc_bias)
        self.midlayer = MidLayer(*self.layer_sizes(), norm_before_residual=config.norm_before_residual)
        self.norm = Norm(H, eps)
        self.finish_init()

    @classmethod
    def build(cls, config: Eagle3Config, geometry: Geometry, draft_ids: Tensor | None) -> Eagle3:
        return cls(config.resolve(geometry), geometry, draft_ids)

    @property
    def layer(self) -> MidLayer:
        return self.midlayer

    def fuse(self, features_BTF: Tensor) -> Tensor:
        return self.fc(self.normed_taps(features_BTF))

    def normed_taps(self, features_BTF: Tensor) -> Tensor:
        features_BTF = features_BTF.to(self.like.dtype)
        if self.input_norm is not None:
            return self.input_norm(features_BTF)
        if self.fc_norm is None:
            return features_BTF
        taps = features_BTF.chunk(len(self.taps), -1)
        return torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)

    def inputs(self, e_BTH: Tensor, g_BTH: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.inputs(e_BTH, g_BTH)

    def outputs(self, out: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(out)
        return (normed if self.config.norm_output else out), normed

    def engine_config(self) -> dict[str, Any]:
        """config.json in the flat layout that vLLM, SGLang and TensorRT-LLM read. Both keys of the tap ids: top level counts like we do,
        eagle_config counts layer outputs (one less). TensorRT-LLM looks for norm_before_fc in eagle_config only."""
        c = self.config
        numbers = [t for t in self.taps if isinstance(t, int)]
        return {
            "architectures": ["LlamaForCausalLMEagle3"], **self.llama_keys(), "bias": c.fc_bias, "norm_before_residual": c.norm_before_residual,
            "fc_norm": c.fc_norm, "norm_before_fc": c.norm_before_fc, "norm_output": c.norm_output,
            "num_aux_hidden_states": len(self.taps), "eagle_aux_hidden_state_layer_ids": numbers,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in numbers], "use_aux_hidden_state": True,
                             "norm_before_fc": c.norm_before_fc},
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
        return self.unroll_at(batch, step_positions(batch.positions_BT, steps))
