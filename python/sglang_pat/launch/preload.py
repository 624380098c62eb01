"""Imported once by the fork server (``sglang_pat.launch.processes``), so that forked processes start at once."""

import setproctitle

from sglang_pat.launch.noise import quiet_imports

# Finds the place of the process title by its environment, which each forked process then replaces.
setproctitle.getproctitle()

with quiet_imports():
    from sglang.srt.models.registry import ModelRegistry

    import sglang_pat.coordinator.process
    import sglang_pat.rank.process  # noqa: F401

    # SGLang imports all its model files on the first look-up.
    ModelRegistry.get_supported_archs()
