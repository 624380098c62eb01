__version__ = "0.1.0"
"""Version of the project."""

HOST_VERSION = "0.5.12.post1"
"""The one SGLang version the adapters in ``sglang_pat.host`` are written for."""
