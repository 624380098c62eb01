"""Questions answered by simulation, without an engine: ``python -m studies.NAME``, from the top of the repository.

Not installed.  ``policies``, ``alternatives``, ``tail_batching`` and ``bias`` are the studies; ``modelled`` makes
``profiles/``; ``rounds`` simulates rounds of the admitter.
"""
