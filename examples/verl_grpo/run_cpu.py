"""GRPO with verl on this machine's CPU, with the adaptive engine or with stock SGLang; nothing of verl is changed.

    python examples/verl_grpo/run_cpu.py [--model DIR] [--rollout sglang_pat|sglang] [--steps 3] [verl's overrides]

SmolLM2-135M, if no other model is given.  One trainer rank and one rank of the engine a "GPU".  ``--out`` gets verl's
metrics (``metrics.jsonl``), the engines' decisions and a picture of the run (``run.png``).  On GPUs you need none of
this: see ``run_gpu.sh``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import training_picture as picture
from on_cpu import cpu_jobs

HERE = Path(__file__).resolve().parent
CPU_PLATFORM = "on_cpu.verl_cpu"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def environment(metrics: Path, tp: int) -> dict[str, str]:
    """Environment of a verl job without GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    return cpu_jobs.environment(
        # Stock SGLang asks which cores each rank of a replica may use.
        SGLANG_CPU_OMP_THREADS_BIND="|".join(str(cores[rank % len(cores)]) for rank in range(tp)),
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES=",".join(filter(None, [CPU_PLATFORM, os.environ.get("VERL_USE_EXTERNAL_MODULES")])),
        VERL_ENGINE_DEVICE="cuda",  # verl's training engines have no CPU form; this one asks the platform
        VERL_FILE_LOGGER_PATH=str(metrics),
        HYDRA_FULL_ERROR="1",
    )


def rows(texts: list[str]) -> list[dict]:
    """Prompts as verl reads them."""
    return [
        {
            "data_source": "example",
            "prompt": [{"role": "user", "content": text}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"split": "train", "index": i},
        }
        for i, text in enumerate(texts)
    ]


def with_chat_template(model: Path, copy: Path) -> Path:
    """The model's folder; a copy with a template of ours if it has none, as a made-up model."""
    config = json.loads((model / "tokenizer_config.json").read_text())
    if "chat_template" in config or (model / "chat_template.jinja").exists():
        return model
    shutil.copytree(model, copy, dirs_exist_ok=True)
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    return copy


def overrides(args: argparse.Namespace, data: Path, ray_folder: Path) -> list[str]:
    """Overrides of verl's configuration."""
    tokens = args.batch * args.samples * (args.response + 128)
    engine = (
        "{device:cpu,attention_backend:torch_native,sampling_backend:pytorch,grammar_backend:none,"
        f"enable_memory_saver:false,max_total_tokens:{tokens}}}"
    )
    rollout = {
        "name": args.rollout,
        "mode": "async",
        "n": args.samples,
        "dtype": "float32",
        "tensor_model_parallel_size": args.tp or args.gpus,
        "n_gpus_per_node": args.gpus,
        "free_cache_engine": False,
        "enforce_eager": True,
        "load_format": "auto",
        "skip_tokenizer_init": True,
        "max_num_seqs": 64,
        "calculate_log_probs": True,
        "log_prob_micro_batch_size_per_gpu": 4,
        "gpu_memory_utilization": 0.3,
        "agent.num_workers": 1,
    }
    settings = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "val.parquet",
        "data.train_batch_size": args.batch,
        "data.max_prompt_length": 128,
        "data.max_response_length": args.response,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.model.path": args.model,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": args.lr,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.batch,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision": (
            "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
        ),
        **{f"actor_rollout_ref.rollout.{name}": value for name, value in rollout.items()},
        "+actor_rollout_ref.rollout.engine_kwargs.sglang": engine,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": HERE / "reward.py",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": args.gpus,
        "trainer.nnodes": 1,
        "trainer.device": "cpu",
        "trainer.total_training_steps": args.steps,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "hydra.run.dir": data / "hydra",
        "ray_kwargs.ray_init.num_cpus": 32,
        "+ray_kwargs.ray_init.num_gpus": args.gpus,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 500_000_000,
        "+ray_kwargs.ray_init._temp_dir": ray_folder,
    }
    if args.rollout == "sglang_pat":
        settings["+actor_rollout_ref.rollout.engine_kwargs.sglang_pat"] = args.settings
        settings["+actor_rollout_ref.rollout.engine_kwargs.sglang_pat.log"] = data / "decisions.jsonl"
    return [f"{name}={value}" for name, value in settings.items()]


def steps(metrics: Path) -> list[picture.Step]:
    """verl's figures of each step, for the picture."""
    drawn = []
    for line in metrics.read_text().splitlines():
        data = json.loads(line)["data"]
        if "timing_s/step" not in data:
            continue  # of a validation
        names = {"generation": "gen", "training": "update_actor", "weight sync": "update_weights"}
        parts = {part: data.get(f"timing_s/{name}", 0.0) for part, name in names.items()}
        drawn.append(picture.Step.of(data["critic/score/mean"], data["timing_s/step"], parts))
    return drawn


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollout", choices=["sglang_pat", "sglang"], default="sglang_pat")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face folder (default: SmolLM2-135M)")
    parser.add_argument("--out", type=Path, default=Path("out/verl"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=2, help="ranks of the trainer, and of the engine")
    parser.add_argument("--tp", type=int, help="GPUs of an engine (default: all)")
    parser.add_argument("--batch", type=int, default=4, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="responses a prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of a response at most")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--settings", default="{base_tp:1,policy:threshold,switch_at:6}", help="of the adaptive engine")
    args, extra = parser.parse_known_args(argv)

    import pandas

    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    metrics = out / "metrics.jsonl"
    for old in (metrics, *out.glob("decisions.*.jsonl")):
        old.unlink(missing_ok=True)
    chat = args.model is None
    args.model = with_chat_template(cpu_jobs.model(args.model), out / "model")
    texts = cpu_jobs.prompts(args.batch * args.steps, chat)
    pandas.DataFrame(rows(texts)).to_parquet(out / "train.parquet")
    pandas.DataFrame(rows(texts[: args.batch])).to_parquet(out / "val.parquet")
    with cpu_jobs.ray_folder() as folder:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(args, out, folder), *extra]
        code, _ = cpu_jobs.run(command, environment(metrics, args.tp or args.gpus))
    if code == 0:
        print(picture.draw(out / "run.png", steps(metrics), sorted(out.glob("decisions.*.jsonl"))))
    return code


if __name__ == "__main__":
    sys.exit(main())
