"""Everything that reads, writes, overrides or imports SGLang's internals, by operation.

Other packages call these operations and import nothing of SGLang (``tests/unit/test_host.py`` says which do already).
What a module is for, its head says; ``docs/sglang.md`` lists what each relies on.  Every attribute is written by
``assign``.  ``fixes``: what goes when SGLang is mended.
"""
