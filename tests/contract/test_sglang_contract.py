"""SGLang as ``sglang_pat.sglang`` expects it; a new SGLang version fails here, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_pat.launch import contract
from sglang_pat.version import SGLANG_VERSIONS

pytestmark = pytest.mark.contract


def test_version():
    contract.check_sglang()


def test_the_package_may_be_installed_beside_each_sglang_version():
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (sglang,) = [need for text in project["dependencies"] if (need := Requirement(text)).name == "sglang"]
    assert all(version in sglang.specifier for version in SGLANG_VERSIONS)
    assert "0.5.11" not in sglang.specifier and "0.5.13" not in sglang.specifier


def test_other_version_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(contract, "get_installed_version", lambda: "0.6.0")
    with pytest.raises(contract.SGLangMismatch, match=r"SGLang 0\.6\.0 is installed.*0\.5\.12\.post1") as caught:
        contract.check_sglang()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("symbol", contract.read_symbols(), ids=lambda s: s.name)
def test_symbol(symbol):
    assert symbol.find_problem() is None


def test_a_symbol_that_has_changed_is_named():
    """The symbol is imported, or is read in the source."""
    missing = ["sglang.srt.layers.sampler:no_such_thing()", "~sglang.srt.no_such_module:f()"]
    missing.append("~sglang.srt.server_args:ServerArgs.no_such_method()")
    for line in missing:
        assert "missing" in contract.Symbol.parse(line).find_problem()
    changed = {"sglang.srt.layers.sampler:create_sampler(backend, device)": "device"}
    changed["~sglang.srt.server_args:ServerArgs.from_cli_args(args, more)"] = "more"
    for line, parameter in changed.items():
        assert contract.Symbol.parse(line).find_problem() == f"parameters changed: {parameter}"


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
"""Attributes that the receiving rank makes anew, in any version of SGLang."""

LOCAL_SINCE_0_5_23 = (
    # given again by the tokenized request
    "cache_salt return_flat_raw_top_logprobs return_hidden_states_mode logprob mm_audio_tokens mm_image_tokens "
    "mm_video_tokens mm_token_counts_ready "
    # given again by the new pools and tree, or by the batch that computes a piece of the prompt
    "kv lock cache_request_handle extend_end full_untruncated_fill_ids prefix_len inflight_middle_chunks "
    "num_matched_prefix_tokens prefill_attempt_count token_indices_to_pool _think_end_matcher "
    # of features that are refused at start, or in a request
    "_session_mm_items beam_group decision_layout disagg_decode_prefix_len discard_output_reason dllm_algo_state "
    "dllm_has_literal_mask dllm_initialized early_send_prefix_end expected_kv_checksum host_hit_is_storage "
    "host_loaded_length kv_hints kv_rotation_base mamba_host_hit_length mamba_lazy_checkpoint "
    "output_dsa_topk_indices pd_rebootstrap_forced_output_id pending_bootstrap return_sampling_mask "
    "sampling_logprobs_mode session_generation session_id spec_cap_lens_histogram spec_num_block_accept_tokens "
    "spec_num_cap_tokens staged_prefetch_plan storage_hit_start storage_prefetch_last_match_len "
    "storage_prefetch_retry_attempts swa_branching_seqlen swa_host_hit_length"
).split()


def test_every_request_attribute_is_accounted_for():
    """A new attribute of SGLang's ``Req`` must be carried over a switch or be made anew."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.host import adapter, requests

    theirs = adapter.rank
    carried = {*requests.CARRIED, *theirs.CARRIED, "origin_input_ids", "output_ids"}
    local = set(LOCAL) - carried
    if adapter.FOLDER == "v0_5_23":
        local |= set(LOCAL_SINCE_0_5_23) - carried
    req = Req("rid", "text", [1, 2], SamplingParams(), return_logprob=True)
    logprobs = theirs.get_logprobs(req)
    names = {*requests.LOGPROBS, *theirs.FLAT_LOGPROBS}
    kept = set(vars(req)) if logprobs is req else set(logprobs.__slots__)
    assert names - theirs.LATE <= kept, "logprobs that SGLang no longer has"
    unknown = (set(vars(req)) | kept) - carried - local - names
    assert not unknown, f"new attributes of Req: {sorted(unknown)}"
    gone = carried - set(vars(req)) - theirs.LATE
    assert not gone, f"attributes that Req no longer has: {sorted(gone)}"


def test_reseeding_is_sglangs():
    """Our function gives the numbers of SGLang's, and nothing grows with the number of switches."""
    import random

    import numpy as np
    import torch
    from sglang.srt.utils import set_random_seed

    from sglang_pat.host.seeds import set_seed

    def draw() -> tuple:
        return random.random(), float(np.random.rand()), torch.rand(3).tolist()

    drawn = []
    for seeding in (set_random_seed, set_seed):
        seeding(7)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    queued = len(torch.cuda._queued_calls)
    set_seed(8)
    assert len(torch.cuda._queued_calls) == queued and draw() != drawn[0]


def test_a_request_is_sealed_once():
    """What never changes is pickled on first use and comes out as it went in; the request keeps its tokens."""
    from array import array

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.host import adapter
    from sglang_pat.host.requests import unseal
    from sglang_pat.rank import degrees, speculation
    from sglang_pat.switch import requests

    params, make_tokens = SamplingParams(temperature=0.5), adapter.rank.make_tokens
    given = TokenizedGenerateReqInput(
        rid="r", input_text="text", input_ids=make_tokens([5, 6, 70_000]), input_embeds=None, token_type_ids=None,
        mm_inputs=None, sampling_params=params, return_logprob=True, logprob_start_len=-1, top_logprobs_num=2,
        token_ids_logprob=None, stream=True,
    )  # fmt: skip
    req = Req("r", "text", given.input_ids, params)
    req.pat_request, req.pat_prompt, req.pat_sealed = given, array("I", given.input_ids), None
    degrees.begin(req, tp=1)
    speculation.begin(req)
    req.output_ids = make_tokens([1, 2])
    capsule = requests.serialize_request(req)
    assert list(given.input_ids) == [5, 6, 70_000]
    request, prompt = unseal(capsule.sealed)
    assert request.input_ids == given.input_ids and prompt.tolist() == [5, 6, 70_000]
    assert request.rid == "r" and request.top_logprobs_num == 2
    assert request.sampling_params.temperature == 0.5 and capsule.output.tolist() == [1, 2]
    assert "origin_input_ids" not in capsule.state, "the prompt travels once"
    assert requests.serialize_request(req).sealed is capsule.sealed


def test_every_scheduler_request_type_is_known():
    """Each reply the TokenizerManager waits for must be one that the coordinator merges."""
    from sglang.srt.managers import tokenizer_control_mixin as control

    from sglang_pat.host.controls import CONTROLS

    answered = {reply.__name__ for reply, _ in CONTROLS.values()}
    expected = {spec[1].__name__ for spec in control._COMMUNICATOR_SPECS}
    assert expected - answered == set()
