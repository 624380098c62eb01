__version__ = "0.1.0"
"""Version of the project."""

HOST_VERSIONS = ("0.5.12.post1", "0.5.12")
"""The SGLang versions that the adapters in ``sglang_pat.host`` are written for, the one that is tested first.

verl 0.9.1 pins the second.  Every symbol of ``host/contract.txt`` is the same in both.
"""
