"""What the `Config`s of heads have in common: the vocabulary, the taps, the sizes of layers that default to the target's. Subclass one beside a head.

`resolve(geometry)` fills the target's values in; RecipeError where head and target don't fit.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field

from draftheads.recipes.schema import Geometry, RecipeError, Section

Tap = int | Literal["final"]


class HeadConfig(Section):
    """None means: as in the target, or the head's own default (`default_taps`)."""

    taps: tuple[Tap, ...] | None = None
    draft_vocab_size: int | None = Field(None, ge=1, description="None: the whole vocabulary")
    freeze_lm_head: bool = Field(True, description="use the target's lm_head rows; false: train a copy of them")
    hidden_size: int | None = Field(None, ge=1)
    max_positions: int | None = Field(None, ge=1, description="drafting switches off beyond this position")

    # Fields that are the target's where they are None.
    OF_TARGET: ClassVar[tuple[str, ...]] = ("hidden_size", "max_positions")

    def default_taps(self, geometry: Geometry) -> tuple[Tap, ...]:
        """The post-norm state that the target's lm_head reads."""
        return ("final",)

    def resolve(self, geometry: Geometry) -> Self:
        filled = {n: getattr(geometry, n) if getattr(self, n) is None else getattr(self, n) for n in self.OF_TARGET}
        if filled["hidden_size"] != geometry.hidden_size:
            raise RecipeError(f"head.hidden_size is {filled['hidden_size']}, the target's embedding has {geometry.hidden_size}: leave it out")
        if self.draft_vocab_size is not None and self.draft_vocab_size > geometry.vocab_size:
            raise RecipeError(f"head.draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary of {geometry.vocab_size}")
        chosen = self.default_taps(geometry) if self.taps is None else self.taps
        return self.model_copy(update={**filled, "taps": _checked_taps(chosen, geometry.num_layers, self.taps is None)})


class LayerConfig(HeadConfig):
    """Of heads with attention of their own."""

    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)

    OF_TARGET: ClassVar[tuple[str, ...]] = (*HeadConfig.OF_TARGET, "intermediate_size", "num_heads", "num_kv_heads", "head_dim")

    def resolve(self, geometry: Geometry) -> Self:
        found = super().resolve(geometry)
        assert found.num_heads is not None and found.num_kv_heads is not None and found.head_dim is not None
        if found.num_heads % found.num_kv_heads:
            raise RecipeError(f"head.num_heads {found.num_heads} is not a multiple of head.num_kv_heads {found.num_kv_heads}")
        if found.head_dim % 2:
            raise RecipeError(f"head.head_dim must be even for rotary positions, found {found.head_dim}")
        return found


def mask_token(token: int | None, geometry: Geometry) -> int:
    """The id that stands for a token yet to be drafted. By default the last one, which every target has: the rarest token of a BPE vocabulary, or an
    unused row of the embedding."""
    V = geometry.vocab_size
    if token is not None and token >= V:
        raise RecipeError(f"head.mask_token_id is {token}, the target's ids are 0 … {V - 1}: choose one of them or leave it out")
    return V - 1 if token is None else token


def _checked_taps(chosen: tuple[Tap, ...], layers: int, default: bool) -> tuple[Tap, ...]:
    numbers = [t for t in chosen if isinstance(t, int)]
    # Rising: engines sort the ids, so that another order would be another head there.
    if not chosen or numbers != sorted(set(numbers)) or any(not 0 <= t < layers for t in numbers) or "final" in chosen[:-1]:
        what = f"the default taps {list(chosen)}" if default else f"taps {list(chosen)}"
        raise RecipeError(f"head.taps: {what} must be distinct, rising and in 0 … {layers - 1} for a target of {layers} layers; "
                          "set head.taps, e.g. " + str(sorted({min(1, layers - 1), layers // 2, layers - 1})))
    return chosen
