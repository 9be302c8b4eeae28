"""Decoding with draft heads: `from draftheads.inference import generate, SpeculativeDecoder`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftheads.inference.api import SpeculativeDecoder, generate
    from draftheads.inference.decode import complete, decode
    from draftheads.inference.requests import Completion, Limits, Request, Sampling
    from draftheads.inference.target import Target

__all__ = ["Completion", "Limits", "Request", "Sampling", "SpeculativeDecoder", "Target", "complete", "decode", "generate"]

# Lazy (PEP 562): the records in `requests` and the metrics can be imported without loading transformers.
_HOME = {"generate": "api", "SpeculativeDecoder": "api", "decode": "decode", "complete": "decode", "Target": "target"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'requests')}"), name)
