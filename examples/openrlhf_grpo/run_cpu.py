"""GRPO with OpenRLHF on this machine's CPU, with the adaptive engine; nothing of OpenRLHF is changed.

    python examples/openrlhf_grpo/run_cpu.py [--model DIR] [--steps 3] [--mode collocated|async] [OpenRLHF's arguments]

SmolLM2-135M, if no other model is given.  One trainer rank and one rank of the engine a "GPU".
``--out`` gets OpenRLHF's metrics (``metrics.jsonl``), each engine's decisions and a picture of the run (``run.png``).
On GPUs you need none of this: see ``run_gpu.sh``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import reduce
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import training_picture as picture
from on_cpu import cpu_jobs, deepspeed_ops

HERE = Path(__file__).resolve().parent
MODES = {
    "collocated": ["--train.colocate_all", "--vllm.enable_sleep"],
    "async": ["--train.async_enable", "--train.partial_rollout_enable", "--vllm.sync_backend", "gloo"],
}


def arguments(args: argparse.Namespace, out: Path) -> list[str]:
    """Arguments of OpenRLHF's command, ours among them."""
    named = {
        "actor.model_name_or_path": args.model,
        "actor.adam.lr": 1e-5,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": args.gpus,
        "ref.num_nodes": 1,
        "ref.num_gpus_per_node": args.gpus,
        "reward.remote_url": HERE / "reward.py",
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": args.gpus,
        "vllm.gpu_memory_utilization": 0.3,
        "algo.kl.init_coef": 0,
        "algo.advantage.estimator": "group_norm",
        "algo.advantage.is_correction_level": "token",
        "rollout.batch_size": args.batch,
        "rollout.n_samples_per_prompt": args.samples,
        "rollout.micro_batch_size": 4,
        "rollout.max_new_tokens": args.response,
        "train.batch_size": args.batch * args.samples,
        "train.micro_batch_size": 4,
        "train.num_episodes": 1,
        "train.max_epochs": 1,
        "data.max_samples": args.batch * args.steps,
        "data.max_len": args.response + 128,
        "data.prompt_dataset": out / "prompts.jsonl",
        "data.input_key": "input",
        "data.label_key": "label",
        "ds.zero_stage": 2,
        "ds.param_dtype": "bf16",
        "ds.attn_implementation": "eager",
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "checkpoints",
        "logger.tensorboard_dir": out / "tensorboard",
        "sglang_pat.base_tp": 1,
        "sglang_pat.policy": "threshold",
        "sglang_pat.switch_at": args.switch_at,
        "sglang_pat.log": out / "decisions.jsonl",
        "sglang.device": "cpu",
        "sglang.attention_backend": "torch_native",
        "sglang.sampling_backend": "pytorch",
        "sglang.grammar_backend": "none",
        "sglang.enable_memory_saver": "false",
        "sglang.enable_weights_cpu_backup": "false",
        "sglang.max_total_tokens": args.batch * args.samples * (args.response + 128),
    }
    flags = ["--vllm.enforce_eager", "--vllm.enable_prefix_caching", *MODES[args.mode]]
    return [*(word for name, value in named.items() for word in (f"--{name}", str(value))), *flags]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face folder (default: SmolLM2-135M)")
    parser.add_argument("--out", type=Path, default=Path("out/openrlhf"), metavar="DIR")
    parser.add_argument("--mode", choices=MODES, default="collocated")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=2, help="ranks of the trainer, and of the engine")
    parser.add_argument("--batch", type=int, default=4, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="responses a prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of a response at most")
    parser.add_argument("--switch-at", type=int, default=6, help="requests left when the engine merges")
    args, extra = parser.parse_known_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    chat = args.model is None
    out, args.model = args.out.resolve(), cpu_jobs.model(args.model)
    for old in out.glob("decisions.*.jsonl"):
        old.unlink()
    rows = [{"input": text, "label": ""} for text in cpu_jobs.prompts(args.batch * args.steps, chat)]
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Apart from the engine the trainer needs GPUs of its own where the two run at once.
    gpus = args.gpus if args.mode == "collocated" else 2 * args.gpus
    with cpu_jobs.ray_folder() as folder:
        command = [sys.executable, "-m", "on_cpu.openrlhf_cpu", str(gpus), str(folder)]
        words = [*arguments(args, out), *(["--data.apply_chat_template"] if chat else []), *extra]
        environment = cpu_jobs.environment(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(deepspeed_ops.copied(folder)))
        code, lines = cpu_jobs.run([*command, *words], environment)
    figures = metrics(lines)
    (out / "metrics.jsonl").write_text("".join(json.dumps({"data": data}) + "\n" for data in figures))
    if code == 0:
        print(picture.draw(out / "run.png", steps(figures), sorted(out.glob("decisions.*.jsonl"))))
    return code


def metrics(lines: list[str]) -> list[dict[str, float]]:
    """OpenRLHF's metrics of each step, which it only prints."""
    steps = [step[1] for line in lines if (step := re.search(r"Global step \d+: (\{.*\})", line))]
    # As JSON, which has words for what is no number.
    words = ((r"'", '"'), (r"\bnan\b", "NaN"), (r"\binf\b", "Infinity"))
    return [json.loads(reduce(lambda text, word: re.sub(*word, text), words, step)) for step in steps]


def steps(found: list[dict[str, float]]) -> list[picture.Step]:
    """Steps of the picture."""
    names = {"generation": "generation", "training": "ppo_train", "weight sync": "broadcast"}
    return [
        picture.Step.of(
            data["reward"], data["timing/step_total"], {part: data[f"timing/{name}"] for part, name in names.items()}
        )
        for data in found
    ]


if __name__ == "__main__":
    sys.exit(main())
