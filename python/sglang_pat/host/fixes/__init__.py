"""Mends of SGLang: each module goes when SGLang is mended, and names the report.

Base classes of ours switch them on: :class:`.scheduler.MendedScheduler`, :class:`.grammars.MendedModelRunner`,
:class:`.weight_updates.WholeUpdatesTpModelWorker`, :class:`.pauses.PausingTokenizerManager`; what checks a request is
called by ``host/tokenizer.py``.
"""
