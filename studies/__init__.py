"""Questions answered by simulation, without an engine: ``python -m studies.NAME``, from the top of the repository.

Not installed.  ``policies``, ``alternatives``, ``tail_batching`` and ``bias`` are the studies; ``modelled`` makes
``profiles/``; ``rounds`` simulates rounds of the admitter.
"""

from pathlib import Path

PROFILES = Path(__file__).resolve().parent / "profiles"
"""Of machines that are not here."""
