"""Imported once by the fork server (``sglang_pat.launch.processes``), so that forked processes start at once."""

import gc

import setproctitle

# Finds the place of the process title by its environment, which each forked process then replaces.
setproctitle.getproctitle()

import sglang_pat.coordinator.process  # noqa: E402  # pyright: ignore[reportUnusedImport]
import sglang_pat.host.process  # noqa: E402, F401  # pyright: ignore[reportUnusedImport]
from sglang_pat.host.child import import_model_files  # noqa: E402

import_model_files()
# None of it will ever be garbage.  SGLang 0.5.23 collects in each rank's start, which took 0.8 s with it.
gc.freeze()
