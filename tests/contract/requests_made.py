"""Requests as clients and as SGLang's server make them, for tests; no test of its own."""

from __future__ import annotations


def ask(**fields):
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(**({"input_ids": [7, 8]} | fields))


def tokenize(params=None, **fields):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = SamplingParams(**(params or {}))
    made.normalize(None)
    return TokenizedGenerateReqInput(
        **dict(
            rid="r", input_text="", input_ids=[7, 8], mm_inputs=None, sampling_params=made, return_logprob=True,
            logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
        ) | fields
    )  # fmt: skip
