"""How much of a response is looked through for its stop patterns: SGLang looks through all of it, after every token."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req

from sglang_pat.fixes.patterns import LONGEST_TEXT

_stock = Req.tail_str


def tail_str(req: Req) -> str:
    """SGLang's: the end of the response in which stop strings and patterns may be; with patterns, of bounded length.

    A stop string that is complete is in it (``sampling.MAX_STOP_TEXT``).
    """
    text = _stock(req)
    return text[-LONGEST_TEXT:] if req.sampling_params.stop_regex_strs else text


def bound_text() -> None:
    """Have SGLang use :func:`tail_str` in this process."""
    Req.tail_str = tail_str
