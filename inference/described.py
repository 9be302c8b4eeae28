"""A target without its weights: what is needed to write prompts for it and to read its answers, where servers hold the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftheads.inference import sources
from draftheads.recipes.schema import Geometry, TargetSection


@dataclass(frozen=True)
class Described:
    """As Target has them. geometry.vocab_size is what the config says."""

    name: str
    revision: str | None
    tokenizer: Any
    geometry: Geometry
    eos_ids: frozenset[int]
    template_hash: str


def describe_target(section: TargetSection) -> Described:
    """From config and tokenizer alone. RecipeError, one line naming the cure, when that fails."""
    source = sources.locate(section.name, section.revision)
    model, tokenizer, geometry, revision = sources.describe(source, section.trust_remote_code, section.geometry)
    sources.set_chat_template(tokenizer, section.chat_template)
    return Described(section.name, revision, tokenizer, geometry, sources.eos_ids(model, tokenizer), sources.template_hash(tokenizer))
