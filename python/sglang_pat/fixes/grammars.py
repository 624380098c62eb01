"""Grammars that fail in the middle of a response abort their request; in SGLang they end the rank.

A grammar fails where a token came that it does not take (``min_new_tokens`` forbids the end, which is all that a
finished grammar allows), and where it has grown too large.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_pat.coordinator.controls import MAX_MESSAGE


class Guarded:
    """A grammar in front of SGLang's mask: if it cannot say what it allows, it allows everything for this step."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
        try:
            self._inner.fill_vocab_mask(vocab_mask, idx)
        except Exception as error:
            self._inner.pat_failed = str(error).split("\n")[0][:MAX_MESSAGE]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def guard(info: SamplingBatchInfo) -> None:
    """Put a :class:`Guarded` before every grammar of the batch, for one step."""
    if info.grammars:
        info.grammars = [Guarded(grammar) if grammar else grammar for grammar in info.grammars]


def abort_failed(reqs: list[Req]) -> None:
    """Finish the requests whose grammars have failed in the step that was just run."""
    for req in reqs:
        if (error := getattr(req.grammar, "pat_failed", None)) is not None and req.to_finish is None:
            req.to_finish = FINISH_ABORT(f"the grammar failed: {error}", HTTPStatus.BAD_REQUEST)
