"""Test builds: a switch that makes what should have been made at start fails (``SGLANG_PAT_CHECK_STEADY=1``)."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner import ModelRunner

CHECK_STEADY_ENV = "SGLANG_PAT_CHECK_STEADY"

_MAKERS = (
    (dist, "new_group"),
    (MHATokenToKVPool, "__init__"),
    (ModelRunner, "init_device_graphs"),
    (ModelRunner, "init_attention_backend"),
)
"""What makes process groups, pools, graphs (and so a second copy of their memory)."""


@contextmanager
def forbid_new_resources():
    """Inside the block, calls to :data:`_MAKERS` raise RuntimeError, in test builds."""
    with ExitStack() as stack:
        if os.environ.get(CHECK_STEADY_ENV) == "1":
            for owner, name in _MAKERS:
                stack.enter_context(mock.patch.object(owner, name, side_effect=_make_refusal(owner, name)))
        yield


def _make_refusal(owner: Any, name: str) -> RuntimeError:
    return RuntimeError(f"a switch called {owner.__name__}.{name}: it is to be made at start")
