"""Questions answered by simulation, without an engine: ``python -m studies.NAME``, from the top of the repository.

Not installed.  ``policies``, ``starts``, ``tail_batching`` and ``bias`` are the studies, and ``compare`` answers for
your own lengths, ``own_pace`` says what of a regret no policy could avoid; ``simulate`` drains a batch, ``rounds``
simulates rounds of the admitter; ``modelled`` makes ``profiles/``.
"""

from pathlib import Path

PROFILES = Path(__file__).resolve().parent / "profiles"
"""Folder with profiles of machines that are not here."""
