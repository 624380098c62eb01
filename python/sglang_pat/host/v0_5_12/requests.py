"""SGLang's ``Req``: all of a request's state is in its attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.managers.schedule_batch import Req

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
"""Attributes that go over as they are, beside tokens and logprobs."""

FLAT_LOGPROBS = ()
"""Other attributes with logprobs, which go over as they are."""

LATE = frozenset({"cur_decode_ids_len", "input_top_logprobs_val"})
"""Attributes that SGLang makes on first use: a fresh request does not have them."""


def get_logprobs(req: Req) -> Any:
    """The object that has the lists of logprobs, and the number and ids of what is asked for."""
    return req


def make_tokens(ids: Iterable[int]) -> list[int]:
    """Token ids as ``Req`` keeps them."""
    return list(ids)
