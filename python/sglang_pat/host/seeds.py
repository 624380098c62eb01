"""The random numbers of a rank."""

from __future__ import annotations

import random

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Do what SGLang's ``set_random_seed`` does, for the devices that are there.

    For each kind that is not, ``torch.manual_seed`` keeps the call and a printed stack for ever, which takes
    milliseconds.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
