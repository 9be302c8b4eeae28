"""EAGLE-1, EAGLE-2 and HASS: one decoder layer that predicts the target's next post-norm state, and feeds on its prediction.

    features h_t: target's post-norm state ───┐
    token x_{t+1} ─ target's embedding ─► e ─ cat[e; h] ─ fc ─► Llama layer without its first norm ─► h'_{t+1} ─ target's lm_head ─► q(x_{t+2})
                                              └ fed back as the next step's h: h'_{t+1}

The prediction is in the space of the states that the target's lm_head reads, so there is no norm behind the layer and nothing of the head's own
behind that. heads/feedback.py has the rest: slots, the unrolled loop, drafting.

EAGLE-1: arXiv 2401.15077 (one unroll step, losses smooth_l1 and soft_ce, noise on the features). EAGLE-2: arXiv 2406.16858 (the same weights,
drafting dynamic trees). HASS: arXiv 2408.15766 (several unroll steps, detach_feedback, loss topk besides). Names and shapes of the weights are
those that engines load (fc, layers.0.*); they read the target's lm_head, so a reduced vocabulary, or a trained lm_head, is for our own decoder.

Shape suffixes: B rows, T slots, F feature width (one tap: H), H hidden, X = H.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, Unrolled
from draftheads.heads.config import LayerConfig
from draftheads.heads.feedback import FeedbackHead, step_positions
from draftheads.heads.layers import Layer
from draftheads.recipes.schema import Geometry, RecipeError


class EagleConfig(LayerConfig):
    """taps: the post-norm state, and no other."""

    type: Literal["eagle"] = "eagle"
    # vLLM drops a bias of fc without a word, SGLang invents one where there is none: false, and exports write zeros.
    fc_bias: bool = Field(False, description="as in the first published heads")
    detach_feedback: bool = Field(False, description="HASS: no gradient through the state that is fed back")
    num_layers: Literal[1] = 1

    def resolve(self, geometry: Geometry) -> EagleConfig:
        found = super().resolve(geometry)
        if found.taps != ("final",):
            raise RecipeError(f"head.taps: eagle reads the state that it predicts, ['final'], found {list(found.taps or ())}: leave head.taps out")
        return found


class Eagle(FeedbackHead):
    Config: ClassVar[type[EagleConfig]] = EagleConfig

    def __init__(self, config: EagleConfig, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__(config, geometry, draft_ids)
        H = geometry.hidden_size
        self.fc = nn.Linear(2 * H, H, bias=config.fc_bias)
        self.layers = nn.ModuleList([Layer(*self.layer_sizes(), input_norm=False)])
        self.finish_init()

    @classmethod
    def build(cls, config: EagleConfig, geometry: Geometry, draft_ids: Tensor | None) -> Eagle:
        return cls(config.resolve(geometry), geometry, draft_ids)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def fuse(self, features_BTF: Tensor) -> Tensor:
        return features_BTF.to(self.like.dtype)

    def inputs(self, e_BTH: Tensor, g_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """The embedding comes first in fc's input, as in the published heads."""
        h_BTH = self.fc(torch.cat([e_BTH, g_BTH], -1))
        return self.layer.inputs(h_BTH), h_BTH

    def outputs(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return (out.detach() if self.config.detach_feedback else out), out

    def regressed(self, states: Tensor) -> Tensor:
        return states

    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        return self.unroll_at(batch, step_positions(batch.positions_BT, steps))

    def engine_config(self) -> dict[str, Any]:
        """config.json as vLLM and SGLang read it: the first knows the second of the architectures, SGLang the first. `bias` is fc's, and true for
        loaders where it is absent."""
        return {"architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"], **self.llama_keys(), "bias": self.config.fc_bias}
