"""A check of test builds: a switch that makes what should have been made at start fails
(``SGLANG_PAT_CHECK_STEADY=1``)."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

from sglang_pat.host import adapter

CHECK_STEADY_ENV = "SGLANG_PAT_CHECK_STEADY"


@contextmanager
def forbid_new_resources():
    """Have calls to what makes groups, pools and graphs inside the block raise RuntimeError, in test builds."""
    with ExitStack() as stack:
        if os.environ.get(CHECK_STEADY_ENV) == "1":
            for owner, name in adapter.runner.RESOURCE_MAKERS:
                refusal = RuntimeError(f"a switch called {owner.__name__}.{name}: it is to be made at start")
                stack.enter_context(mock.patch.object(owner, name, side_effect=refusal))
        yield
