"""What each process of an OpenRLHF job needs before it imports OpenRLHF."""

from __future__ import annotations

SETUP = f"{__name__}.setup"
"""For Ray's ``worker_process_setup_hook``."""


def setup() -> None:
    from sglang_pat.integrations.openrlhf import facade

    facade.install()
