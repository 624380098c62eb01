"""Imported once by the fork server (``sglang_pat.host.processes``), so that forked processes start at once."""

import setproctitle

# Finds the place of the process title by its environment, which each forked process then replaces.
setproctitle.getproctitle()

from sglang.srt.models.registry import ModelRegistry  # noqa: E402

from sglang_pat.host import coordinator, rank, scheduler  # noqa: E402, F401

# The host imports all its model files on the first look-up.
ModelRegistry.get_supported_archs()
