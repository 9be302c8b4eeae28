"""What every test starts from: no network, no tracker that would call home, one thread, the same seeds."""

from __future__ import annotations

import os
import random

# Before anything imports huggingface_hub, transformers or wandb: they read these once. Inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"  # "online" with a key and no server blocks for minutes
os.environ["WANDB_SILENT"] = "true"
os.environ["ACCELERATE_DISABLE_RICH"] = "1"
os.environ["NO_COLOR"] = "1"
os.environ["COLUMNS"] = "160"  # rich folds a one-line error at the terminal's width
os.environ.setdefault("OMP_NUM_THREADS", "1")  # equal results want equal numbers of threads, here and in what tests start

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
hypothesis.settings.register_profile("draftheads", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("draftheads")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
