"""SGLang's ``Req``: values that others read of it, and its whole state, read on one rank and restored on another.

Where a request's KV lies is in ``host/kv.py`` and ``host/tree.py``.
"""

from __future__ import annotations

import copy
import pickle
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign, assign_many

__all__ = ["Req", "TokenizedGenerateReqInput"]

if TYPE_CHECKING:

    class Req(schedule_batch.Req):
        """A request with what is kept at it since it came in.

        Attributes:
            pat_request: what the server sent; ``pat_prompt``: its token ids; ``pat_sealed``: both as bytes, None until
                a switch needs them.
            pat_limit: most tokens of the response; ``pat_since``: so many of these came with the prompt;
                ``pat_family``: the same number for all requests with one prompt.
            pat_degrees: TP degrees that made the tokens, as ``(first token, degree)``.
            pat_drafts: steps with drafts, drafts checked, drafts right.
            pat_experts: experts that its tokens went to (``host/routed_experts.py``).
        """

        pat_request: TokenizedGenerateReqInput
        pat_prompt: array
        pat_sealed: bytes | None
        pat_limit: int
        pat_since: int
        pat_family: int
        pat_degrees: tuple[tuple[int, int], ...]
        pat_drafts: tuple[int, int, int]
        pat_experts: Any

else:
    Req = schedule_batch.Req

# -- what others read --------------------------------------------------------------------------------------------------


def get_name(req: Req) -> str:
    return req.rid


def get_prompt(req: Req) -> Sequence[int]:
    """Token ids of the prompt."""
    return req.origin_input_ids


def count_tokens(req: Req) -> int:
    """Number of tokens of prompt and output."""
    return req.seqlen


def get_tokens(req: Req) -> Sequence[int]:
    """Token ids of prompt and output, a list or an array."""
    return req.origin_input_ids + req.output_ids


def get_output(req: Req) -> Sequence[int]:
    """Token ids generated so far."""
    return req.output_ids


def get_sampling_params(req: Req) -> Any:
    return req.sampling_params


def has_ended(req: Req) -> bool:
    return req.finished()


def is_in_pieces(req: Req) -> bool:
    """Whether some pieces of the prompt are computed, and not all."""
    return bool(req.extend_batch_idx) and not req.output_ids


def get_entry_time(req: Req) -> float:
    """Time at which ``req`` came into the queue, in seconds, by which priority scheduling sorts."""
    return req.time_stats.wait_queue_entry_time


def set_entry_time(req: Req, at: float) -> None:
    assign(req.time_stats, wait_queue_entry_time=at)


def is_answer_due(req: Req) -> bool:
    """Whether ``req``, no health probe, has ended and its client has not been told."""
    return req.finished() and not req.finished_output and HEALTH_CHECK_RID_PREFIX not in req.rid


def is_cut_off(req: Req, full: bool) -> bool:
    """Whether the end of ``req`` says nothing of how long it would have become.

    It was aborted, or has ended for its length and is ``full``, as long as it may be.
    """
    return isinstance(req.finished_reason, FINISH_ABORT) or (full and isinstance(req.finished_reason, FINISH_LENGTH))


# -- what a switch changes ---------------------------------------------------------------------------------------------


def mark_own_prefix(req: Req) -> None:
    """Have SGLang count no cache hit for what ``req``, which waits, finds in the tree: it is its own."""
    assign(req, retracted_stain=req.retracted_stain or bool(req.output_ids or req.extend_batch_idx))


def drop_piece_logprobs(req: Req) -> None:
    """Forget the logprobs of pieces that are computed again: SGLang (0.5.12) forgets some and keeps others."""
    assign(
        req,
        temp_input_top_logprobs_val=None,
        temp_input_top_logprobs_idx=None,
        temp_input_token_ids_logprobs_val=None,
        temp_input_token_ids_logprobs_idx=None,
    )


def begin_prompt_again(req: Req) -> None:
    """Have the prompt of ``req``, which waits with some pieces of it computed, computed from its beginning."""
    assign(req, input_token_logprobs=None, extend_batch_idx=0)
    drop_piece_logprobs(req)


@contextmanager
def keep_piece_logprobs(waiting: Sequence[Req]) -> Iterator[None]:
    """Keep the logprobs of prompts in pieces while SGLang, inside the block, makes a batch of some of ``waiting``.

    It takes no KV from the tree of tokens whose logprobs are asked for, and computes both.  Of a prompt in pieces that
    a switch has brought the logprobs are there.
    """
    begun = [(req, req.logprob_start_len) for req in waiting if req.input_token_logprobs]
    for req, start in begun:
        assign(req, logprob_start_len=start + len(req.input_token_logprobs))
    try:
        yield
    finally:
        for req, start in begun:
            assign(req, logprob_start_len=start)


def get_pending_end(req: Req) -> Any | None:
    """The reason for which ``req`` is to end with its next step; None if it goes on."""
    return req.to_finish


def abort(req: Req, reason: Any) -> None:
    """End ``req`` for the ``reason`` that :func:`get_pending_end` gave."""
    req.set_finish_with_abort(reason.message)


# -- the whole state ---------------------------------------------------------------------------------------------------

LOGPROBS = tuple(
    f"{of}_{what}_logprobs_{kind}"
    for of in ("input", "output")
    for what in ("token", "top", "token_ids")
    for kind in ("val", "idx")
)
"""Lists with an entry for each token where logprobs are asked for.  SGLang sends each entry to the client once, a
stretch of some tokens at a time, and does not look at it again."""

CARRIED = tuple(
    "surr_offset read_offset cur_decode_ids_len decoded_text send_token_offset send_decode_id_offset "
    "send_output_token_logprobs_offset input_logprob_sent hidden_states customized_info "
    "cached_tokens cached_tokens_device cached_tokens_host cached_tokens_storage "
    "_cache_breakdown_computed retraction_count is_retracted retracted_stain to_finish finished_reason finished_len "
    "finished_output reasoning_tokens _is_reasoning_over return_logprob logprob_start_len "
    "extend_batch_idx decode_batch_idx grammar_wait_ct temp_scaled_logprobs top_p_normalized_logprobs "
    "has_log_time_stats "
    # of the pieces of a prompt that have been computed
    "input_token_logprobs temp_input_top_logprobs_val temp_input_top_logprobs_idx "
    "temp_input_token_ids_logprobs_val temp_input_token_ids_logprobs_idx".split()
)
"""Attributes that go over as they are, in all versions, beside tokens and logprobs."""

ITSELF = "__req__"
"""Key under which a custom logit processor finds its request in ``custom_params``."""


def seal(message: TokenizedGenerateReqInput, prompt: array) -> bytes:
    """Pickle what never changes in a request: the message of the TokenizerManager, and the prompt's token ids."""
    request = copy.copy(message)
    assign(request, input_ids=None)  # the prompt has them
    return pickle.dumps((request, prompt), pickle.HIGHEST_PROTOCOL)


def unseal(sealed: bytes) -> tuple[TokenizedGenerateReqInput, array]:
    """The request as it came in, and its prompt's token ids (unsigned 32 bit)."""
    request, prompt = pickle.loads(sealed)
    assign(request, input_ids=adapter.rank.make_tokens(prompt))
    return request, prompt


def read_state(req: Req, message: TokenizedGenerateReqInput) -> tuple[array, dict[str, Any]]:
    """The tokens generated so far (unsigned 32 bit), and the other values that go over, by name: logprobs, what
    :data:`CARRIED` and the adapter's name, the prompt if it is no longer that of ``message``, and the ``custom_params``
    of a custom logit processor, which may count in them."""
    logprobs = adapter.rank.get_logprobs(req)
    state = {name: getattr(req, name) for name in (*CARRIED, *adapter.rank.CARRIED) if hasattr(req, name)}
    names = (*LOGPROBS, *adapter.rank.FLAT_LOGPROBS)
    state |= {name: getattr(logprobs, name) for name in names if hasattr(logprobs, name)}
    if req.origin_input_ids is not message.input_ids:
        state["origin_input_ids"] = req.origin_input_ids
    if req.custom_logit_processor and (custom := req.sampling_params.custom_params):
        state["custom_params"] = {name: value for name, value in custom.items() if name != ITSELF}
    return array("I", req.output_ids), state


def read_times(req: Req) -> dict[str, float]:
    """Numeric fields of SGLang's time stats, seconds of this machine's clock."""
    stats = req.time_stats
    return {
        field.name: value for field in fields(stats) if isinstance(value := getattr(stats, field.name), (int, float))
    }


def count_sent_logprobs(req: Req, name: str, length: int) -> int:
    """Number of the ``length`` entries of ``name``, one of :data:`LOGPROBS`, that the client has."""
    if name.startswith("input_"):
        return length if req.input_logprob_sent else 0
    # SGLang's count is at least one, also after an output without tokens.
    return min(req.send_output_token_logprobs_offset, length)


def write_state(req: Req, output: array, state: dict[str, Any], times: dict[str, float]) -> None:
    """Write into a fresh ``req`` what :func:`read_state` and :func:`read_times` have read from another."""
    tokens, late = adapter.rank.make_tokens(output), adapter.rank.LATE
    names = (*LOGPROBS, *adapter.rank.FLAT_LOGPROBS)
    logprobs, state = (
        {name: state[name] for name in names if name in state},
        {name: value for name, value in state.items() if name not in names},
    )
    assign_many(adapter.rank.get_logprobs(req), logprobs, late)
    if custom := state.pop("custom_params", None):
        req.sampling_params.custom_params |= custom
    assign_many(req, state | {"output_ids": tokens}, late)
    assign_many(req.time_stats, times)
    if req.surr_offset is not None:
        # SGLang keeps this list beside its parts; rebuilt instead of sent twice.
        begin = adapter.rank.make_tokens(req.origin_input_ids_unpadded[req.surr_offset :])
        req.surr_and_decode_ids = begin + tokens[: req.cur_decode_ids_len]
