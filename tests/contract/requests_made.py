"""Requests as clients and as SGLang's server make them, for tests; no test of its own."""

from __future__ import annotations

from typing import Any


def ask(**fields):
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(**({"input_ids": [7, 8]} | fields))


def make_message(kind: type, **fields) -> Any:
    """Make a message of SGLang's, with None for all that must be given and is not."""
    from sglang_pat.host import adapter

    return kind(**dict.fromkeys(name for name, required in adapter.controls.list_fields(kind) if required) | fields)


def tokenize(params=None, **fields):
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.host import adapter

    made = SamplingParams(**(params or {}))
    made.normalize(None)
    known = dict(
        rid="r", input_text="", input_ids=[7, 8], sampling_params=made, return_logprob=True, logprob_start_len=-1,
        top_logprobs_num=0, stream=False,
    )  # fmt: skip
    return make_message(adapter.controls.MarkableRequest, **known | fields)
