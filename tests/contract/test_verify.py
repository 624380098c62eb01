"""What a step that checks drafts takes apart by its rows (``host/verify.py``)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_pat.host import verify

NO_ROWS = {
    "next_token_logits": "the sampler has read them",
    "full_logits": "diffusion",
    "mm_input_embeds": "prompts",
    "customized_info": "by key",
    # 0.5.23
    "beam": "beam search, which is refused",
    "auxiliary_device_output": "of plug-ins of SGLang's",
    "hidden_states_token_indices": "prompts",
    "last_hidden_states": "not sent to clients",
    "input_logprobs_copy_done": "prompts",
    "sampling_mask_output": "nothing is drafted for who asks",
    "next_token_sampling_mask_idx": "nothing is drafted for who asks",
    "next_token_sampling_logprobs": "nothing is drafted for who asks",
    "next_token_sampling_mask_status": "nothing is drafted for who asks",
}
"""Fields that need no rows, and why; those that begin with ``input_`` are of prompts."""


def test_every_field_of_an_output_is_known():
    fields = {field.name for field in dataclasses.fields(LogitsProcessorOutput)}
    unknown = {name for name in fields - {*verify.ROWS, *NO_ROWS} if not name.startswith("input_")}
    assert not unknown, "does it have an entry for each row?  Then it belongs into ROWS"


@pytest.mark.parametrize("rows", [[0], [3, 1], [0, 1, 2, 3]])
def test_rows_of_an_output(rows):
    lists = {name: [[name, row] for row in range(4)] for name in verify.ROWS if name != "next_token_logprobs"}
    output = LogitsProcessorOutput(
        next_token_logits=None, next_token_logprobs=torch.arange(4.0), customized_info={"key": list("abcd")}, **lists
    )
    result = GenerationBatchResult(logits_output=output, next_token_ids=torch.arange(10, 14), routed_experts_output="x")
    part = verify.select_rows(result, rows, whole=False)
    assert part.next_token_ids.tolist() == [10 + row for row in rows]
    assert part.logits_output.next_token_logprobs.tolist() == rows
    assert part.logits_output.customized_info == {"key": ["abcd"[row] for row in rows]}
    for name in lists:
        assert getattr(part.logits_output, name) == [[name, row] for row in rows]
    assert part.routed_experts_output is None
    assert verify.select_rows(result, rows, whole=True).routed_experts_output == "x"
    assert output.next_token_logprobs.tolist() == [0, 1, 2, 3], "the step's own is as it was"
