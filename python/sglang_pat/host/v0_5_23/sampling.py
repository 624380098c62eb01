"""Sampling state of a batch, which SGLang copies to the device at once, with all ends of a response; and grammars.

SGLang makes a mask for each step, and fills the rows of a batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.constrained.base_grammar_backend import GrammarRow
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.host.fixes.grammars import GuardedGrammar

AT_ONCE: dict[type, type] = {}
"""SGLang's penalizers, and those in their place: ``BatchedMinNewTokensPenalizer`` makes one copy by itself."""


def make_sampling_info(batch: ScheduleBatch) -> SamplingBatchInfo:
    """SGLang's sampling state of ``batch``."""
    return SamplingBatchInfo.from_schedule_batch(batch, batch.model_config.vocab_size)


# -- grammars ----------------------------------------------------------------------------------------------------------


def get_ebnf_kind(params: SamplingParams) -> str:
    """Kind of a grammar in EBNF, as SGLang's cache has it."""
    return "full_assistant_ebnf" if params.ebnf_full_assistant else "ebnf"


class GuardedBatch(GuardedGrammar):
    """A :class:`GuardedGrammar` that fills the rows of its batch at once."""

    def fill_vocab_mask_batched(self, entries: Sequence[Any], vocab_mask: Any) -> None:
        """Fill the rows of ``entries``, all of them guarded; where that fails, one by one."""
        try:
            self._inner.fill_vocab_mask_batched(
                [GrammarRow(row=one.row, grammar=one.grammar._inner) for one in entries], vocab_mask
            )
        except Exception:
            for one in entries:
                one.grammar.fill_vocab_mask(vocab_mask, one.row)
            return
        for one in entries:  # llguidance raises nothing then
            if (check := getattr(one.grammar, "_check_err", None)) is not None:
                one.grammar.note_failure(check)


def guard_grammar(grammar: Any) -> GuardedGrammar:
    """A guard in front of ``grammar``, for one step."""
    return GuardedBatch(grammar)


class RebuildingGrammarManager(GrammarManager):
    """SGLang's ``GrammarManager``, for requests that are made again with the grammar that they have."""

    def _apply_request_reasoning_config(self, req: Req) -> None:
        # One that has begun was told already, and SGLang raises.
        if not (isinstance(req.grammar, ReasonerGrammarObject) and req.grammar._decoding_started()):
            super()._apply_request_reasoning_config(req)
