"""LayeredHead: what heads share that have decoder layers of the target's sizes and one lm_head: feedback.py and block.py.

Shape suffixes: B rows, T slots, H hidden (D in base.py), U draft vocabulary, V target's, D head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.base import DraftHead
from draftheads.heads.config import LayerConfig
from draftheads.heads.layers import borrow_embedding, borrow_rows, lm_head, nan_table, rope_parameters, target_rotary
from draftheads.recipes.schema import Geometry


class LayeredHead(DraftHead):
    """A subclass makes its layers in __init__ and ends it with `finish_init`."""

    config: Any  # a resolved LayerConfig
    embed_VD: Tensor
    lm_head: nn.Linear

    def __init__(self, config: LayerConfig, geometry: Geometry, draft_ids: Tensor | None) -> None:
        super().__init__()
        assert config.taps is not None and config.hidden_size is not None, f"{type(self).__name__} wants a resolved config: use heads.build_head"
        self.config, self.geometry, self.taps = config, geometry, config.taps
        self.set_vocabulary(draft_ids, config.draft_vocab_size)
        self.register_buffer("embed_VD", nan_table(geometry.vocab_size, config.hidden_size), persistent=False)
        # In a tuple, hence no submodule: .to(bfloat16) would round its frequencies.
        self._rotary = (target_rotary(config.head_dim or 0, geometry),)

    def layer_sizes(self) -> tuple[int, int, int, int, int, float]:
        """The sizes that the layers of heads/layers.py ask for, in their order."""
        c = self.config
        return c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, self.geometry.rms_norm_eps

    def finish_init(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):  # a fixed 0.02 would make activations, and chance attention scores, grow with wide inputs
                nn.init.normal_(module.weight, std=min(0.02, module.in_features**-0.5))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.lm_head = lm_head(self.config.hidden_size, len(self.d2t), frozen=self.config.freeze_lm_head)

    def borrow(self, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        """Borrowed tensors are shared where device and dtype allow. A trained lm_head starts from the target's rows, once: while it is NaN."""
        borrow_embedding(self, embed_VD, self.like)
        borrow_rows(self.lm_head, self.rows_UD(lm_head_VD), self.like)

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A weight: its device and dtype are the head's."""

    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        return self.lm_head(states)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed_VD).to(self.like.dtype)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] → cos, sin [B, T, D]."""
        cos, sin = self._rotary[0](self.like, positions)
        return cos, sin

    def llama_keys(self) -> dict[str, Any]:
        """What every such head's config.json says in llama's own words."""
        c, g, rope = self.config, self.geometry, rope_parameters(self.geometry)
        return {
            "model_type": "llama", "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
            "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
            "vocab_size": g.vocab_size, "draft_vocab_size": len(self.d2t), "max_position_embeddings": c.max_positions,
            "rms_norm_eps": g.rms_norm_eps, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            # Never tied: a loader that ties would replace the draft's (U, H) lm_head by the embedding.
            "tie_word_embeddings": False, "freeze_lm_head": c.freeze_lm_head,
            "rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else rope, "rope_parameters": rope,
            "torch_dtype": str(self.like.dtype).removeprefix("torch."),
        }
