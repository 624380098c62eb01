"""The TP degree that generated each token of a request: with its answer, as ``meta_info["tp_from_token"]``.

``[[0, 1], [37, 2]]``: tokens 0 to 36 of the output come from a replica of TP degree 1, the others from one of degree 2.
A user who sees trainer and engine disagree about a token can ask whether switches have to do with it.
"""

from __future__ import annotations

from typing import Any

from sglang_pat.host import outputs
from sglang_pat.host.requests import Req, get_output

KEY = "tp_from_token"
"""Key of ``meta_info``."""

Degrees = tuple[tuple[int, int], ...]
"""Pairs of the first token of the output, and the degree that generated it and those after it."""


def begin(req: Req, tp: int) -> None:
    """Note that ``req`` is new, on a replica of degree ``tp``."""
    req.pat_degrees = ((0, tp),)


def record_degree(req: Req, tp: int) -> None:
    """Note that ``req`` goes on with its next token on a replica of degree ``tp``."""
    length = len(get_output(req))
    kept = tuple(pair for pair in req.pat_degrees if pair[0] < length)
    if not kept or kept[-1][1] != tp:
        kept += ((length, tp),)
    req.pat_degrees = kept


def end(req: Req) -> None:
    """Note that ``req`` makes no more tokens, maybe none since it was adopted."""
    length = len(get_output(req))
    req.pat_degrees = tuple(pair for pair in req.pat_degrees if pair[0] < length)


def add_degrees_to_output(output: Any, reqs: list[Req]) -> None:
    """Add the degrees to an output about the requests ``reqs``."""
    outputs.add_info(output, KEY, [req.pat_degrees for req in reqs])
