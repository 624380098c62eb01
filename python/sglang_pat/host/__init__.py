"""All that reads, writes, overrides or imports SGLang's internals, by operation.

Other packages call these operations and import nothing of SGLang (``tests/unit/test_host.py`` counts).  ``fixes``: what
goes when SGLang is mended.
"""
