"""Imported once by the fork server (``sglang_pat.host.processes``), so that forked processes start at once."""

from sglang.srt.models.registry import ModelRegistry

from sglang_pat.host import coordinator, rank, scheduler  # noqa: F401

# The host imports all its model files on the first look-up.
ModelRegistry.get_supported_archs()
