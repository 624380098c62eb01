"""A generative reward model of verl's whose engine streams layers, by setting."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_pat.testing import models

from . import verl_rewards
from .conftest import MODELS

pytestmark = pytest.mark.integration

LAYERS = 5
ON_CPU = (
    "{{device:cpu,attention_backend:torch_native,sampling_backend:pytorch,grammar_backend:none,"
    "enable_memory_saver:false,max_total_tokens:4096,log_level:info}}"
)


@pytest.mark.long
def test_rewards_are_what_the_model_says(verl_job):
    """Rewards of all responses of a step against transformers' own model, whose layers are resident."""
    judge = models.make_random("llama", MODELS / "llama-judge", layers=LAYERS)
    model = "reward.reward_model"
    job = verl_job(
        "--batch", "4", "--samples", "2", "--steps", "1", "ray_kwargs.ray_init.num_gpus=4",
        "trainer.rollout_data_dir={out}/batches", f"reward.custom_reward_function.path={verl_rewards.__file__}",
        "reward.custom_reward_function.name=ask_judge", f"{model}.enable=true", f"{model}.enable_resource_pool=true",
        f"{model}.n_gpus_per_node=2", f"{model}.nnodes=1", f"{model}.model_path={judge}",
        f"{model}.rollout.name=sglang", f"{model}.rollout.dtype=float32",
        f"{model}.rollout.tensor_model_parallel_size=2",
        f"{model}.rollout.free_cache_engine=false", f"{model}.rollout.max_num_seqs=8",
        f"+{model}.rollout.engine_kwargs.sglang={ON_CPU}", f"+{model}.rollout.engine_kwargs.sglang_pat.stream_layers=4",
    )  # fmt: skip
    assert job.log.count("4 of 5 layers are streamed from") == 2, "on each rank"
    lines = [json.loads(line) for path in (job.out / "batches").iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == 8
    transformers = models.load_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    whole = transformers.AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    for line in lines:
        tokens = tokenizer.encode(line["output"])[: verl_rewards.JUDGED_TOKENS]
        with torch.no_grad():
            assert line["score"] == whole(torch.tensor([tokens])).logits[0, -1].argmax().item()
