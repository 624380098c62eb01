"""Mends of SGLang: each module goes when SGLang is mended, and names the report.

What one version of SGLang alone needs is in its folder beside this one.  Base classes of ours switch all on:
``RankScheduler`` and ``AdaptiveTpModelWorker`` of these folders, :class:`.grammars.MendedModelRunner`,
:class:`.pauses.PausingTokenizerManager`; what checks a request is called by ``host/tokenizer.py``.
"""
