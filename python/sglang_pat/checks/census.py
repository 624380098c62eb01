"""The census of test builds: what SGLang keeps (``host/census.py``), written by every rank.

``attributes.txt`` in the adapter's folder says of each attribute what it is.  ``tests/engine/test_attributes.py`` holds
the two against each other in every layout, and against engines that were built at that degree.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sglang_pat import files
from sglang_pat.host.census import take_census
from sglang_pat.host.groups import get_place

CENSUS_ENV = "SGLANG_PAT_CENSUS"
"""Variable with a folder: in test builds every rank writes its census there at start and after every switch."""


def record(scheduler: Any, rank: int, epoch: int) -> None:
    """Write the census of this rank, in test builds."""
    if not (folder := os.environ.get(CENSUS_ENV)):
        return
    values, identities = take_census(scheduler)
    tp_rank, tp = get_place(scheduler)
    header = dict(rank=rank, epoch=epoch, tp=tp, tp_rank=tp_rank)
    path = Path(folder) / f"census-{rank}-{epoch}.json"
    files.write(json.dumps(header | dict(values=values, identities=identities)).encode(), path)
