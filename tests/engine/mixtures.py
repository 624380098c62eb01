"""What a request to ``/generate`` may ask for, option by option, and random mixtures of it; no test of its own.

Every field of SGLang's ``GenerateReqInput`` and ``SamplingParams`` is in :data:`FIELDS` or :data:`PARAMS`, where it is
drawn, or in :data:`LEFT`, which says why not.
"""

from __future__ import annotations

import json
import random
from typing import Any

from sglang_pat.host import adapter

from .streams import Body, body

TOKENS = 40
"""Number of tokens of most answers."""

CHOICES = '{"enum": ["red", "green"]}'

FIELDS: dict[str, list[Any]] = {
    "return_logprob": [True],
    "logprob_start_len": [0, 5, 19],
    "top_logprobs_num": [1, 4],
    "token_ids_logprob": [[10, 90], [7]],
    "return_text_in_logprobs": [True],
    "stream": [True],
    "return_hidden_states": [True],
    "priority": [3],
    "extra_key": ["a"],
    "routing_key": ["b"],
    "conversation_id": ["c"],
    "log_metrics": [False],
    "no_logs": [True],
    "background": [True],
    "custom_labels": [{"team": "a"}],
    "require_reasoning": [True],
    "custom_logit_processor": ["disallowed"],
}
"""Fields of the body with the values that are tried; those of SGLang's defaults are left out."""

PARAMS: dict[str, list[Any]] = {
    "max_new_tokens": [0, 1, 2 * TOKENS],
    "min_new_tokens": [30],
    "n": [2],
    "temperature": [1.0],
    "top_p": [0.7],
    "top_k": [5],
    "min_p": [0.1],
    "frequency_penalty": [0.4],
    "presence_penalty": [0.9],
    "repetition_penalty": [1.2],
    "stop": [["ab", "q"]],
    "stop_token_ids": [[77, 300, 401]],
    "stop_regex": ["[xyz]{2}"],
    "no_stop_trim": [True],
    "ignore_eos": [False],
    "logit_bias": [{"77": 5.0}, {"3": 3.0}],
    "regex": ["([a-f]{3}-){6}z"],
    "json_schema": [f'{{"type": "array", "items": {CHOICES}, "minItems": 2, "maxItems": 2}}'],
    "ebnf": ['root ::= "yes" | "no"'],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "stream_interval": [1, 7],
    "custom_params": [{"pat_limit": 50}],
    "sampling_seed": [5],
}

# A pickled class, by its name.
_CLASS = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
DISALLOWED = json.dumps({"callable": _CLASS.hex()})

GRAMMARS = {"regex", "json_schema", "ebnf"}
OF_LOGPROBS = {"logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"}

LEFT = {
    "what it is about, which every request has": "text input_ids sampling_params rid",
    "refused by name": "input_embeds positional_embed_overrides return_indexer_topk session_params",
    "of mixtures of experts (test_routed_experts.py)": "return_routed_experts routed_experts_start_len",
    "of features that are refused at start": "image_data video_data audio_data use_audio_in_video modalities lora_path "
    "lora_id bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size disagg_prefill_dp_rank "
    "need_wait_for_mm_inputs num_items_assigned max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
    "video_max_dynamic_patch multi_item_delimiter_indices",
    "of one engine, so 0 or nothing": "routed_dp_rank data_parallel_rank",
    "the server's own": "http_worker_ipc received_time external_trace_header",
    "nothing reads it for text": "return_bytes return_entropy",
    "needs a model that calls functions": "structural_tag",
}

if adapter.FOLDER == "v0_5_23":
    LEFT |= {
        "refused by name, and new": (
            "return_sampling_mask sampling_logprobs_mode return_flat_raw_top_logprobs kv_hints token_indices_to_pool "
            "beam_width watermark"
        ),
        "of images, and new": (
            "mm_hashes mm_content_hashes video_config images_config mm_processor_kwargs encoder_urls"
        ),
        "not tried yet": (
            "session_id return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 max_thinking_tokens "
            "return_prompt_token_ids cache_salt"
        ),
        "SGLang's own": (
            "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized ebnf_full_assistant"
        ),
    }


def request(options: dict[str, Any], seed: int) -> Body:
    """A request for these options, with a prompt of its own."""
    made = body(seed, TOKENS)
    made["sampling_params"] |= {name: value for name, value in options.items() if name in PARAMS}
    made |= {name: value for name, value in options.items() if name in FIELDS}
    if OF_LOGPROBS & options.keys():
        made["return_logprob"] = True
    if GRAMMARS & options.keys():
        made["sampling_params"]["ignore_eos"] = False
    if "custom_logit_processor" in options:
        made["custom_logit_processor"] = DISALLOWED
        made["sampling_params"]["custom_params"] = {"token_ids": list(range(0, 500, 3))}
    return made


def fits(options: dict[str, Any]) -> bool:
    """Whether SGLang takes them together, and the answer is one that can be compared."""
    names = options.keys()
    return not (
        len(GRAMMARS & names) > 1
        or (GRAMMARS & names and {"min_new_tokens", "logit_bias", "custom_logit_processor"} & names)
        or {"n", "stream"} <= names
        or ("min_new_tokens" in names and options.get("max_new_tokens", TOKENS) < options["min_new_tokens"])
    )


def list_one_of_each(rng: random.Random) -> list[dict[str, Any]]:
    """Every option beside every other one: each value on a request of its own, and a plain one."""
    every = [{name: value} for table in (FIELDS, PARAMS) for name, values in table.items() for value in values] + [{}]
    rng.shuffle(every)
    return every


def draw_requests(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests for several options each."""
    values = FIELDS | PARAMS
    found: list[dict[str, Any]] = []
    while len(found) < count:
        names = rng.sample(sorted(values), rng.randint(1, 7))
        # What SGLang lays out by request is asked for more often.
        names += [name for name in ("return_hidden_states", "return_logprob", "stream") if rng.random() < 0.3]
        options = {name: rng.choice(values[name]) for name in names}
        if fits(options):
            found.append(options)
    return found
