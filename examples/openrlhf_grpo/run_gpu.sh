#!/usr/bin/env bash
# GRPO with OpenRLHF 0.11.2 on one node: eight GPUs, one adaptive engine that owns them all, collocated with the trainer.
#   MODEL=Qwen/Qwen2.5-7B-Instruct PROMPTS=prompts.jsonl REWARD=reward.py examples/openrlhf_grpo/run_gpu.sh [more arguments]
# Written for GPUs and not run on any yet: run_cpu.py is what has been run.
set -euo pipefail
: "${MODEL:?a Hugging Face model}" "${PROMPTS:?a JSON lines file}" "${REWARD:?a Python file with reward_func}"
GPUS=${GPUS:-8} PROFILE=${PROFILE:-}  # PROFILE: from python -m profiler.sweep; without one the engine merges at 8 requests

exec python -m sglang_pat.integrations.openrlhf \
    --actor.model_name_or_path "$MODEL" --reward.remote_url "$REWARD" --data.prompt_dataset "$PROMPTS" \
    --actor.num_nodes 1 --actor.num_gpus_per_node "$GPUS" --ref.num_nodes 1 --ref.num_gpus_per_node "$GPUS" \
    --vllm.num_engines 1 --vllm.tensor_parallel_size "$GPUS" --vllm.gpu_memory_utilization 0.6 \
    --train.colocate_all --vllm.enable_sleep --vllm.enable_prefix_caching \
    --algo.advantage.estimator group_norm --algo.advantage.is_correction_level token \
    --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 8192 --data.max_len 10240 \
    --ds.zero_stage 2 --ds.param_dtype bf16 \
    --sglang_pat.base_tp 1 ${PROFILE:+--sglang_pat.profile "$PROFILE"} "$@"
