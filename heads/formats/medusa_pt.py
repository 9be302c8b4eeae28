"""The official Medusa folder with a pickle, medusa_lm_head.pt, for loaders that read nothing else: the first Medusa code and TensorRT-LLM's legacy
flow. Only written when asked for by this name, into a folder of its own."""

from __future__ import annotations

from draftheads.heads.formats.medusa import TAKES, export, read

__all__ = ["TAKES", "WEIGHTS", "export", "read"]

WEIGHTS = "medusa_lm_head.pt"
