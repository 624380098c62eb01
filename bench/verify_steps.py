"""What a decode step costs that also checks k drafted tokens of each request, on one GPU.

    python bench/verify_steps.py [--shards llama8b-tp1 llama8b-tp8 a3b-tp4] [--quick] [--json FILE]

Stock SGLang's model runner with CUDA graphs and random weights.  ``llama8b-tp8`` is what one of eight ranks has of
Llama-3.1-8B: one process, no all-reduce.  Two ways to check drafts are timed beside a plain step:

- as rows: each drafted token is one more row of a decode step, and rows of a request share its KV slots;
- as an extend step of k + 1 tokens a request, SGLang's own ``TARGET_VERIFY``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": dict(arch="llama", hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocab=128256),
    "qwen32b": dict(arch="qwen2", hidden=5120, layers=64, heads=40, kv_heads=8, intermediate=27648, vocab=152064),
    "a3b": dict(
        arch="qwen3_moe", hidden=2048, layers=48, heads=32, kv_heads=4, intermediate=6144, vocab=151936, experts=128,
        chosen=8, expert_width=768,
    ),
}  # fmt: skip
"""Shapes of models as published; heads of 128 dimensions."""
CONTEXTS, REQUESTS, TOKENS = (2048, 8192, 16384), (1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 5, 9)
"""``TOKENS`` of a request in a step: 1 is a plain step, k + 1 one that checks k drafts."""
EXTENDED = 5
LONGEST = 20480
ROUNDS, REPEATS = 3, 8


def make_shard(name: str) -> dict[str, Any]:
    """Options of ``testing.models.make_config`` of the shard ``MODEL-tpN``."""
    model, _, degree = name.partition("-tp")
    if model not in SHAPES or degree not in ("1", "2", "4", "8"):
        raise ValueError(f"--shards {name}: give MODEL-tpN, MODEL one of {', '.join(SHAPES)}, N 1, 2, 4 or 8")
    tp, shard = int(degree), dict(SHAPES[model], head_dim=128)
    for size in ("heads", "kv_heads", "intermediate", "expert_width"):
        if size in shard:
            shard[size] = max(1, shard[size] // tp)
    return shard | {"vocab": shard["vocab"] // tp // 64 * 64}


def make_runner(name: str, folder: str) -> Any:
    """SGLang's model runner of the shard, with decode graphs for all numbers of rows."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_pat.testing import models

    models.make_config(context=LONGEST, dtype="bfloat16", **make_shard(name)).save_pretrained(folder)
    sizes = sorted({requests * tokens for requests in REQUESTS for tokens in TOKENS})
    args = ServerArgs(
        model_path=folder, load_format="dummy", skip_tokenizer_init=True, attention_backend="triton",
        grammar_backend="none", cuda_graph_bs=sizes, cuda_graph_max_bs=sizes[-1], max_running_requests=sizes[-1] + 8,
        context_length=LONGEST, mem_fraction_static=0.88, disable_piecewise_cuda_graph=True, disable_radix_cache=True,
    )  # fmt: skip
    _set_envs_and_config(args)
    initialize_moe_config(args)
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(args), mem_fraction_static=args.mem_fraction_static, gpu_id=0,
        tp_rank=0, tp_size=1, moe_ep_rank=0, moe_ep_size=1, pp_rank=0, pp_size=1,
        nccl_port=PortArgs.init_new(args).nccl_port, server_args=args,
    )  # fmt: skip
    for weight, parameter in runner.model.named_parameters():
        if weight.endswith("mlp.gate.weight"):  # random weights of SGLang's size send all tokens to the same experts
            parameter.data.normal_(0, 0.02)
    return runner


def make_verify_graphs(runner: Any) -> Any:
    """Graphs of ``TARGET_VERIFY`` steps of :data:`EXTENDED` tokens a request."""
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    args = runner.server_args
    args.speculative_algorithm, args.speculative_num_draft_tokens = "NGRAM", EXTENDED
    args.cuda_graph_bs = list(REQUESTS)
    runner.spec_algorithm = SpeculativeAlgorithm.from_string("NGRAM")
    runner.init_attention_backend()
    return CudaGraphRunner(runner)


def time_step(runner: Any, graphs: Any, requests: int, tokens: int, context: int, as_rows: bool) -> float:
    """Milliseconds of a step of ``tokens`` tokens for each of ``requests`` requests."""
    import torch

    each, room = tokens if as_rows else 1, context + 16
    rows = requests * each
    start = torch.arange(requests, device="cuda")[:, None] * room
    slots = (start + torch.arange(room, device="cuda")[None]).to(torch.int32) + 1
    runner.req_to_token_pool.req_to_token[:rows, :room] = slots.repeat_interleave(each, 0)
    nth = torch.arange(tokens, device="cuda").repeat(requests)
    lengths = context + 1 + nth if as_rows else torch.full((rows,), context, device="cuda")
    inputs = graphs.buffers
    inputs.req_pool_indices[:rows] = torch.arange(rows, device="cuda")
    inputs.seq_lens[:rows], inputs.seq_lens_cpu[:rows] = lengths, lengths.cpu()
    count = requests * tokens
    inputs.out_cache_loc[:count] = slots[:, context : context + tokens].reshape(-1)
    inputs.positions[:count] = context + nth
    inputs.input_ids[:count] = torch.randint(0, runner.model_config.vocab_size, (count,), device="cuda")
    graphs.attn_backend.init_forward_metadata_replay_cuda_graph(
        rows, inputs.req_pool_indices[:rows], inputs.seq_lens[:rows], int(lengths.sum()), None,
        graphs.capture_forward_mode, graphs.get_spec_info(count), seq_lens_cpu=inputs.seq_lens_cpu[:rows],
    )  # fmt: skip
    graph, samples = graphs.graphs[rows], []
    graph.replay()
    for _ in range(ROUNDS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        for _ in range(REPEATS):
            graph.replay()
        ended.record()
        ended.synchronize()
        samples.append(begun.elapsed_time(ended) / REPEATS)
    return statistics.median(samples)


def measure(name: str, contexts: tuple[int, ...]) -> list[dict[str, Any]]:
    """One entry a context and number of requests that fit: ``rows`` and ``extend``, ms by tokens of a request."""
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(name, folder)
        points = [
            (context, requests)
            for context in contexts
            for requests in REQUESTS
            if requests * (context + 16) + 1 < runner.max_total_num_tokens
        ]
        results = []
        for context, requests in points:
            graphs = runner.graph_runner
            rows = {tokens: time_step(runner, graphs, requests, tokens, context, True) for tokens in TOKENS}
            results.append({"shard": name, "context": context, "requests": requests, "rows": rows})
        graphs = make_verify_graphs(runner)
        for entry, (context, requests) in zip(results, points, strict=True):
            entry["extend"] = {EXTENDED: time_step(runner, graphs, requests, EXTENDED, context, False)}
    return results


def print_table(found: list[dict[str, Any]]) -> None:
    columns = [f"{tokens - 1} as rows" for tokens in TOKENS[1:]] + [f"{EXTENDED - 1} as extend"]
    print("| shard | context | requests | plain, ms |", " | ".join(columns), "|", flush=True)
    for entry in found:
        plain = entry["rows"][TOKENS[0]]
        times = [entry["rows"][tokens] for tokens in TOKENS[1:]] + [entry["extend"][EXTENDED]]
        ratios = " | ".join(f"{ms / plain:.2f}" for ms in times)
        print(f"| {entry['shard']} | {entry['context']:,} | {entry['requests']} | {plain:.2f} | {ratios} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", nargs="+", default=["llama8b-tp1", "llama8b-tp8", "a3b-tp4"], metavar="MODEL-tpN")
    parser.add_argument("--quick", action="store_true", help="the shortest context only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="of a single shard: all times, ms")
    args = parser.parse_args()
    try:
        for name in args.shards:
            make_shard(name)
    except ValueError as error:
        parser.error(str(error))
    import torch

    if not torch.cuda.is_available():
        print("left out: it needs a GPU")
        return 0
    if len(args.shards) > 1:  # a process each: SGLang has one model runner a process
        if args.json:
            parser.error("--json FILE: the times of one shard; give --shards with one")
        command = [sys.executable, __file__, *(["--quick"] if args.quick else []), "--shards"]
        return max(subprocess.run([*command, name]).returncode for name in args.shards)
    results = measure(args.shards[0], CONTEXTS[:1] if args.quick else CONTEXTS)
    print_table(results)
    if args.json:
        args.json.write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
