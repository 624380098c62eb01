"""Imported once by the fork server (``sglang_pat.host.processes``), so that forked processes start at once."""

import setproctitle

from sglang_pat.host.noise import quiet_imports

# Finds the place of the process title by its environment, which each forked process then replaces.
setproctitle.getproctitle()

with quiet_imports():
    from sglang.srt.models.registry import ModelRegistry

    from sglang_pat.host import coordinator, rank, scheduler  # noqa: F401

    # The host imports all its model files on the first look-up.
    ModelRegistry.get_supported_archs()
