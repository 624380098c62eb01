"""Requests across a switch: a capsule of plain values, and SGLang's ``Req`` rebuilt from it.

A capsule is the tokenized request as it came in, plus everything that has happened to it
since.  :data:`CARRIED` and :data:`LOCAL` together name every attribute of SGLang's ``Req``; the
contract test holds them against SGLang, so a new attribute fails there by name.
"""

from __future__ import annotations

import copy
import pickle
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req

from sglang_pat.rank.degrees import Degrees
from sglang_pat.switch import compiled

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

CARRIED = (
    "output_ids decoded_text surr_offset read_offset cur_decode_ids_len send_token_offset send_decode_id_offset "
    "send_output_token_logprobs_offset input_logprob_sent input_token_logprobs_val input_token_logprobs_idx "
    "input_top_logprobs_val input_top_logprobs_idx input_token_ids_logprobs_val input_token_ids_logprobs_idx "
    "output_token_logprobs_val output_token_logprobs_idx output_top_logprobs_val "
    "output_top_logprobs_idx output_token_ids_logprobs_val output_token_ids_logprobs_idx hidden_states customized_info "
    "cached_tokens cached_tokens_device cached_tokens_host cached_tokens_storage "
    "_cache_breakdown_computed retraction_count is_retracted retracted_stain to_finish finished_reason finished_len "
    "finished_output reasoning_tokens _is_reasoning_over return_logprob logprob_start_len origin_input_ids "
    "extend_batch_idx decode_batch_idx grammar_wait_ct temp_scaled_logprobs top_p_normalized_logprobs "
    "has_log_time_stats "
    # of the pieces of a prompt that have been computed
    "input_token_logprobs temp_input_top_logprobs_val temp_input_top_logprobs_idx "
    "temp_input_token_ids_logprobs_val temp_input_token_ids_logprobs_idx"
).split()
"""Attributes that go over as they are."""

LOGPROBS = tuple(name for name in CARRIED if re.fullmatch("(in|out)put_.*logprobs_(val|idx)", name))
"""Lists with an entry for each token where logprobs are asked for.  SGLang sends each entry to the client once, a
stretch of some tokens at a time, and does not look at it again: what was sent does not go over."""

LOCAL = (
    # given again by the tokenized request
    "rid origin_input_text origin_input_ids_unpadded session input_embeds positional_embed_overrides token_type_ids "
    "multi_item_delimiter_indices http_worker_ipc require_reasoning sampling_params custom_logit_processor "
    "return_hidden_states extra_key lora_id routing_key stream eos_token_ids vocab_size priority top_logprobs_num "
    "token_ids_logprob return_routed_experts routed_experts_start_len return_indexer_topk bootstrap_host "
    "bootstrap_port bootstrap_room skip_radix_cache_insert routed_dp_rank disagg_prefill_dp_rank dimensions "
    "return_pooled_hidden_states multimodal_inputs tokenizer metrics_collector time_stats grammar grammar_key "
    # given again by the new pools and tree
    "fill_ids kv_committed_len kv_allocated_len kv_committed_freed kv_overallocated_freed req_pool_idx prefix_indices "
    "extend_input_len extend_logprob_start_len last_node last_host_node best_match_node host_hit_length "
    "storage_hit_length cache_protected_len is_chunked "
    # how much of a prefill was cached, which SGLang counts before a switch only
    "already_computed "
    # of features that are refused at start
    "swa_evicted_seqlen swa_uuid_for_lock swa_prefix_lock_released mamba_pool_idx mamba_ping_pong_track_buffer "
    "mamba_next_track_idx mamba_last_track_seqlen mamba_branching_seqlen hidden_states_tensor output_topk_p "
    "output_topk_index routed_experts indexer_topk embedding spec_verify_ct spec_num_correct_drafts "
    "spec_correct_drafts_histogram retraction_mb_id disagg_kv_sender start_send_idx tmp_end_idx "
    "metadata_buffer_index pooled_hidden_state hisparse_staging dllm_phase dllm_block_offset dllm_config dllm_ids "
    "dllm_incomplete_ids"
).split()
"""Attributes that the receiving rank makes anew."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """One of :data:`LOGPROBS`: how many of its entries were sent, and the others."""

    sent: int
    entries: list[Any]


@dataclass
class Capsule:
    """One request on its way to new ranks.

    Attributes:
        sealed: the tokenized request as the TokenizerManager sent it, and its prompt (:func:`seal`).
        output: token ids, unsigned 32 bit.  As an array: pickling a list takes a step for each token.
        state: values of :data:`CARRIED`, but ``output_ids``; those of :data:`LOGPROBS` that are not empty as
            :class:`Unsent`.
        times: numeric fields of SGLang's time stats (seconds of this machine's clock).
        compiling: it waits for its grammar; ``constrained``: it has one, which may be to come.
        degrees: which TP degree generated which of its tokens.
    """

    sealed: bytes
    output: array
    state: dict[str, Any]
    times: dict[str, float]
    compiling: bool
    constrained: bool
    degrees: Degrees


def seal(req: Req) -> bytes:
    """What of ``req`` never changes, pickled on first use: before the pause, in PREPARE.

    ``req.pat_request`` and ``req.pat_prompt`` were attached by the adaptive scheduler when the request came in.
    """
    if req.pat_sealed is None:
        request = copy.copy(req.pat_request)
        request.input_ids = None  # the prompt has them
        req.pat_sealed = pickle.dumps((request, req.pat_prompt), pickle.HIGHEST_PROTOCOL)
    return req.pat_sealed


def unseal(sealed: bytes) -> tuple[TokenizedGenerateReqInput, array]:
    """The request as it came in, and its prompt's token ids (unsigned 32 bit)."""
    request, prompt = pickle.loads(sealed)
    request.input_ids = prompt.tolist()
    return request, prompt


def capture(req: Req) -> Capsule:
    """The capsule of ``req``, which is not touched but for its seal."""
    # SGLang sets some attributes on first use only.
    state = {name: getattr(req, name) for name in CARRIED if hasattr(req, name)}
    output = array("I", state.pop("output_ids"))
    for name in LOGPROBS:
        if entries := state.get(name):
            state[name] = _unsent(req, name, entries)
    if req.origin_input_ids is req.pat_request.input_ids:
        del state["origin_input_ids"]
    times = {
        field.name: value
        for field in fields(req.time_stats)
        if isinstance(value := getattr(req.time_stats, field.name), (int, float))
    }
    compiling, constrained = compiled.is_compiling(req), req.grammar is not None
    return Capsule(seal(req), output, state, times, compiling, constrained, req.pat_degrees)


def _unsent(req: Req, name: str, entries: list[Any]) -> Unsent:
    if name.startswith("input_"):
        sent = len(entries) if req.input_logprob_sent else 0
    else:
        # SGLang's count is at least one, also after an output without tokens.
        sent = min(req.send_output_token_logprobs_offset, len(entries))
    return Unsent(sent, entries[sent:])


def restore(req: Req, capsule: Capsule) -> None:
    """Give a fresh ``Req`` (made from what ``capsule`` seals) the state it had before the switch."""
    req.output_ids = capsule.output.tolist()
    for name, value in capsule.state.items():
        # The others keep their places, by which SGLang finds them.
        setattr(req, name, [None] * value.sent + value.entries if isinstance(value, Unsent) else value)
    for name, value in capsule.times.items():
        setattr(req.time_stats, name, value)
    req.pat_degrees = capsule.degrees
    if req.surr_offset is not None:
        # SGLang keeps this list beside its parts; rebuilt instead of sent twice.
        req.surr_and_decode_ids = (
            list(req.origin_input_ids_unpadded[req.surr_offset :]) + req.output_ids[: req.cur_decode_ids_len]
        )


def rebuild(scheduler: SwitchingScheduler, capsule: Capsule, held_grammar: Any | None = None) -> Req:
    """A ``Req`` of this scheduler, in the state in which ``capsule`` found it.

    ``held_grammar``: its grammar as it stands, or the future one, if it was here before.
    """
    given, prompt = unseal(capsule.sealed)
    # In the queue an abort takes the grammar away; one that runs keeps it, on all ranks of its group or on none.
    given_up = capsule.state.get("to_finish") is not None and not capsule.constrained
    with scheduler.grammars.rebuilding(held_grammar, capsule.compiling, given_up):
        req = scheduler.construct(given, prompt, capsule.sealed)
    if held_grammar is not None:
        req.grammar = held_grammar  # also one that no text asks for (strict thinking)
    refused = req.to_finish
    restore(req, capsule)
    if refused is not None and req.to_finish is None:
        # Its grammar turned out not to compile.
        req.set_finish_with_abort(refused.message)
    return req


def forget_pieces(req: Req) -> None:
    """Of a prompt whose pieces are computed again: SGLang (0.5.12) forgets some of their logprobs and keeps others."""
    req.temp_input_top_logprobs_val = req.temp_input_top_logprobs_idx = None
    req.temp_input_token_ids_logprobs_val = req.temp_input_token_ids_logprobs_idx = None


@contextmanager
def logprobs_after_pieces(waiting: list[Req]) -> Iterator[None]:
    """Inside, SGLang makes a batch of some of ``waiting``.

    It takes no KV from the tree of tokens whose logprobs are asked for, and computes both.  Of a prompt in pieces that
    a switch has brought the logprobs are there.
    """
    begun = [(req, req.logprob_start_len) for req in waiting if req.input_token_logprobs]
    for req, start in begun:
        req.logprob_start_len = start + len(req.input_token_logprobs)
    try:
        yield
    finally:
        for req, start in begun:
            req.logprob_start_len = start
