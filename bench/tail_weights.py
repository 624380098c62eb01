"""A decode step of a layout whose weights are views of the base shards, against copies of them, in turn.

    python bench/tail_weights.py [--quick] [--rounds N] [--json FILE]

One rank in one process on one thread, with SGLang's own layers, attention and KV pool, at the shapes of a rank of
that degree.  What its peers would add is left out (an all-reduce gives back its input), so that the difference of the
two is no smaller a share than in an engine.  Times are the thread's own, not the wall's: other processes count less.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import _bench
from rich.console import Console
from rich.table import Table

from sglang_pat.cpu import shim

shim.ensure()

import torch  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_pat.host.layers import make_shard_specs  # noqa: E402
from sglang_pat.layout import ParallelLayout  # noqa: E402
from sglang_pat.rank.shards import list_copies  # noqa: E402
from sglang_pat.rank.weights import Views  # noqa: E402
from sglang_pat.testing.lone import LoneRank  # noqa: E402
from sglang_pat.testing.models import make_config  # noqa: E402

MODELS = {
    # Shapes of SmolLM2-135M as it is served here: 12 query and 4 KV heads, so that 2 and 4 divide them.
    "smollm2": dict(layers=30, hidden=576, heads=12, kv_heads=4, head_dim=64, intermediate=1536, vocab=49152, tie=True),
    # As in rollout.py: two layers, whose steps are mostly weights.
    "wide": dict(layers=2, hidden=2048, heads=16, kv_heads=4, head_dim=128, intermediate=10240, vocab=2048),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128


class Stepper:
    """Decode steps of the models of one rank."""

    def __init__(self, shape: dict) -> None:
        folder = Path(tempfile.mkdtemp())
        self.config = make_config("llama", **shape)
        self.config.save_pretrained(folder)
        args = ServerArgs(
            model_path=str(folder), device="cpu", dtype="float32", attention_backend="torch_native",
            skip_tokenizer_init=True, disable_cuda_graph=True,
        )  # fmt: skip
        self.rank = LoneRank(args)
        self.base = self.rank.make_model(1, 0)
        for param in self.base.parameters():
            param.data = torch.randn(param.shape, dtype=param.dtype) * 0.02

    def viewed(self, layout: ParallelLayout) -> torch.nn.Module:
        """The model of rank 0 in ``layout``, as the engine has it."""
        model = self.rank.make_model(layout.tp, 0)
        Views(model, self.base, layout, ParallelLayout(1, layout.num_ranks), 0)
        return model

    def copied(self, layout: ParallelLayout) -> torch.nn.Module:
        """The model of rank 0 in ``layout`` with weights of its own, each in one piece."""
        model = self.rank.make_model(layout.tp, 0)
        held, shards, base = make_shard_specs(self.base), make_shard_specs(model), dict(self.base.named_parameters())
        for name, param in model.named_parameters():
            source, dim = base[name].data, shards[name].dim
            if dim is not None:
                pieces = list_copies(held[name].list_intervals(1, 0), shards[name].list_intervals(layout.tp, 0))
                source = torch.cat([source.narrow(dim, piece.src, piece.length) for piece in pieces], dim)
            param.data = source.clone(memory_format=torch.contiguous_format)
        return model

    def step(self, model: torch.nn.Module, tp: int, batch: int) -> Callable[[], torch.Tensor]:
        """A decode step of ``model``: ``batch`` requests with ``CONTEXT`` tokens each, to the logits."""
        shape, tokens = self.config, batch * CONTEXT
        pool = MHATokenToKVPool(
            size=tokens, page_size=1, dtype=torch.float32, head_num=max(1, shape.num_key_value_heads // tp),
            head_dim=shape.head_dim, layer_num=shape.num_hidden_layers, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        requests = ReqToTokenPool(size=batch, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
        requests.req_to_token[1:] = torch.arange(1, tokens + 1).view(batch, CONTEXT)
        lengths = torch.full((batch,), CONTEXT)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=batch, input_ids=torch.arange(batch) + 10,
            req_pool_indices=torch.arange(1, batch + 1), seq_lens=lengths, seq_lens_sum=tokens,
            out_cache_loc=torch.arange(1, batch + 1) * CONTEXT, positions=lengths - 1, req_to_token_pool=requests,
            token_to_kv_pool=pool, attn_backend=TorchNativeAttnBackend(SimpleNamespace(device="cpu")),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )  # fmt: skip

        def run() -> torch.Tensor:
            self.rank.install(tp, 0)
            out = model(forward_batch.input_ids, forward_batch.positions, forward_batch)
            return out.next_token_logits

        return run


def compare(stepper: Stepper, tp: int, batches: tuple[int, ...], rounds: int) -> list[dict]:
    """Steps of the viewed and the copied model of degree ``tp`` in turn; ``ratio``: median of the rounds' ratios."""
    layout = ParallelLayout(tp, 1)
    models = {"views": stepper.viewed(layout), "copies": stepper.copied(layout)}
    results = []
    for batch in batches:
        steps = {name: stepper.step(model, tp, batch) for name, model in models.items()}
        logits = {name: step() for name, step in steps.items()}
        torch.testing.assert_close(logits["views"], logits["copies"], rtol=1e-3, atol=1e-3)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds):
            for name in list(steps) if number % 2 else reversed(steps):
                began = time.thread_time()
                steps[name]()
                seconds[name].append(time.thread_time() - began)
        ratios = [ours / theirs for ours, theirs in zip(seconds["views"], seconds["copies"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        results.append(
            {"tp": tp, "batch": batch, "rounds": rounds, "ratio": statistics.median(ratios), "quartiles": quarters}
            | {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
        )
    return results


def main() -> int:
    parser = _bench.options(__doc__, "fewer degrees, batches and rounds; half a minute")
    parser.add_argument("--rounds", type=int, default=100, help="steps of each (default: 100)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    degrees, batches, rounds = ((2,), (1, 16), 20) if args.quick else ((2, 4), BATCHES, args.rounds)
    machine = _bench.about()
    table = Table(title="a decode step, ms", title_justify="left")
    for column in ("model", "tp", "batch", "copies", "views", "views / copies", "half of the rounds"):
        table.add_column(column, justify="right")
    results = []
    for name, model in MODELS.items():
        stepper = Stepper(model)
        for tp in degrees:
            for row in compare(stepper, tp, batches, rounds):
                results.append({"model": name} | row)
                low, _, high = row["quartiles"]
                times = (f"{row[f'{kind}_seconds'] * 1e3:.2f}" for kind in ("copies", "views"))
                table.add_row(name, str(tp), str(row["batch"]), *times, f"{row['ratio']:.3f}", f"{low:.3f}-{high:.3f}")
    Console(width=120).print(table)
    _bench.write(args.json, machine=machine, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
