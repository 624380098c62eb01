__version__ = "0.1.0"
"""Version of the project."""

SGLANG_VERSIONS = ("0.5.12.post1", "0.5.12")
"""The SGLang versions that this package is written for, the one that is tested first.

verl 0.9.1 pins the second.  Every symbol of ``launch/contract.txt`` is the same in both.
"""
