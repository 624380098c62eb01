#!/usr/bin/env bash
# GRPO with verl 0.9.1 on one node: eight GPUs, one adaptive engine that owns them all.
#   MODEL=Qwen/Qwen2.5-7B-Instruct TRAIN=train.parquet VAL=val.parquet examples/verl_grpo/run_gpu.sh [verl's overrides]
# Written for GPUs and not run on any yet: run_cpu.py is what has been run.
set -euo pipefail
: "${MODEL:?a Hugging Face model}" "${TRAIN:?a parquet file}" "${VAL:?a parquet file}"
GPUS=${GPUS:-8} PROFILE=${PROFILE:-}  # PROFILE: from python -m profiler.sweep; without one the engine merges at 8 requests

exec python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN" data.val_files="$VAL" \
    data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=8192 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.name=sglang_pat \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$GPUS" \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    +actor_rollout_ref.rollout.engine_kwargs.sglang_pat="{base_tp:1${PROFILE:+,profile:$PROFILE}}" \
    trainer.v1.trainer_mode=sglang_pat_sync \
    trainer.n_gpus_per_node="$GPUS" trainer.nnodes=1 trainer.logger='[console,tensorboard]' "$@"
