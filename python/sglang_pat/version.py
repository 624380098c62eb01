__version__ = "0.1.0"
"""Version of the project."""

ADAPTERS = {"0.5.12.post1": "v0_5_12", "0.5.12": "v0_5_12", "0.5.23": "v0_5_23"}
"""The SGLang versions that this package is written for, the one that is tested first, and the folder of ``host/`` that
has what is particular to each.

verl 0.9.1 pins 0.5.12, whose symbols are those of 0.5.12.post1.
"""
SGLANG_VERSIONS = tuple(ADAPTERS)
