"""Imported once by the fork server (``sglang_pat.sglang.launch.processes``), so that forked processes start at once."""

import setproctitle

from sglang_pat.sglang.launch.noise import quiet_imports

# Finds the place of the process title by its environment, which each forked process then replaces.
setproctitle.getproctitle()

with quiet_imports():
    from sglang.srt.models.registry import ModelRegistry

    from sglang_pat.sglang import coordinator  # noqa: F401
    from sglang_pat.sglang.rank import process  # noqa: F401

    # SGLang imports all its model files on the first look-up.
    ModelRegistry.get_supported_archs()
