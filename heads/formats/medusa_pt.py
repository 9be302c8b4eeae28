"""The official Medusa folder with a pickle, medusa_lm_head.pt, for loaders that read nothing else: the first Medusa code and TensorRT-LLM's legacy
flow. Only written when asked for by this name, into a folder of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftheads.heads.base import DraftHead
from draftheads.heads.formats import Files, Tables, medusa
from draftheads.heads.formats.medusa import TAKES, read

__all__ = ["TAKES", "WEIGHTS", "export", "read"]

WEIGHTS = "medusa_lm_head.pt"


def export(head: DraftHead, meta: Any, tables: Tables) -> Files:
    # The newer class, medusa_model, has five heads whatever the config says.
    return replace(medusa.export(head, meta, tables), notes=[
        "from medusa.model.medusa_model_legacy import MedusaModel; MedusaModel.from_pretrained(THIS_FOLDER, base_model=TARGET)"])
