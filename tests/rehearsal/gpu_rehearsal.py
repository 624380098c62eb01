"""CUDA's default configuration rehearsed on a CPU: a plug-in of SGLang's that the tests put into the ranks.

Every decode step goes through SGLang's own ``CudaGraphRunner``.  What stands in for a CUDA graph runs the step that it
was captured from again, and does what a graph does: it reads and writes the tensors that it was captured with, whatever
the runner has now, and its results lie where they always lie.  A real graph replayed under another layout reads the
wrong memory without a word; this one ends the engine with the name of what is not as it was.

What was captured, and what was replayed for the first time, is written to the folder in ``GPU_REHEARSAL``: a file for
each rank, named by its process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENV = "GPU_REHEARSAL"
MISTAKE_ENV = "GPU_REHEARSAL_MISTAKE"
"""One of :data:`MISTAKES` that the engine is to make, for a test that it is caught."""


def register() -> None:
    """Entry point; called in every process of an engine."""
    if ENV not in os.environ:
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_pat.host import adapter

    if adapter.FOLDER == "v0_5_12":
        rehearse_graphs_of_0_5_12()
    else:
        rehearse_graphs()
    # This back end keeps nothing between steps.
    TorchNativeAttnBackend.init_cuda_graph_state = lambda self, max_bs, max_num_tokens: None
    TorchNativeAttnBackend.init_forward_metadata_capture_cuda_graph = lambda self, *args: None
    TorchNativeAttnBackend.init_forward_metadata_replay_cuda_graph = lambda self, *args, **kwargs: None
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    rehearse_memory_saver()
    if mistake := os.environ.get(MISTAKE_ENV):
        MISTAKES[mistake]()


def rehearse_graphs() -> None:
    """SGLang's ``DecodeCudaGraphRunner``, whose back end makes the graphs."""
    import torch
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as decode
    from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend

    from sglang_pat.host import adapter

    class RehearsedBackend(BaseCudaGraphBackend):
        def __init__(self, graphs: Any) -> None:
            self._runner, self._graphs = graphs.model_runner, {}

        def capture_session(self, stream: Any) -> Any:
            return nullcontext()

        def capture_one(
            self, shape_key: Any, forward_fn: Callable, capture_inputs: Any = None, post_warmup_hook: Any = None
        ) -> None:
            self._graphs[shape_key] = RecordedGraph(self._runner)
            self._graphs[shape_key].capture(forward_fn)

        def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
            return shape_key in self._graphs

        def replay_session(self) -> Any:
            return nullcontext()

        def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
            return self._graphs[shape_key].replay()

        def cleanup(self) -> None:
            self._graphs.clear()

    def init_decode_cuda_graph(runner: Any) -> None:
        if runner.graph_shared_output is None:  # as on a CPU
            spec = getattr(runner.server_args, "spec", None)  # a judge's engine has none
            graphs = adapter.arguments.read(runner.server_args).cuda_graph_config.decode
            sizes = [graphs.bs] if spec is None else spec.graph_sizes.values()
            rows = max(max(some, default=1) for some in sizes)
            runner.graph_shared_output = GraphSharedOutput(device=torch.device("cpu"), max_rows=rows)
        runner.decode_cuda_graph_runner = decode.DecodeCudaGraphRunner(runner)

    init = model_runner.ModelRunner.init_cuda_graphs

    def init_cuda_graphs(runner: Any, *args: Any, **kwargs: Any) -> None:
        init(runner, *args, **kwargs)
        init_decode_cuda_graph(runner)

    model_runner.ModelRunner.init_decode_cuda_graph = init_decode_cuda_graph
    model_runner.ModelRunner.init_cuda_graphs = init_cuda_graphs
    torch.cpu.is_current_stream_capturing = lambda: False
    decode.resolve_decode_backend = RehearsedBackend
    decode.get_or_create_global_graph_capture_stream = torch.cpu.Stream
    decode.graph_capture = lambda stream: nullcontext(SimpleNamespace(stream=stream))
    # It collects garbage twice, a second each in a process that has imported SGLang; what is captured here allows it.
    decode.freeze_gc = lambda enable_cudagraph_gc: nullcontext()


def rehearse_graphs_of_0_5_12() -> None:
    from sglang.srt.model_executor import cuda_graph_runner, model_runner

    class RehearsedGraphs(cuda_graph_runner.CudaGraphRunner):
        def __init__(self, runner: Any) -> None:
            cuda_graph_runner.set_global_graph_memory_pool("rehearsal")
            super().__init__(runner)

        def _create_device_graph(self) -> RecordedGraph:
            return RecordedGraph(self.model_runner)

        def _capture_graph(self, graph: RecordedGraph, pool: Any, stream: Any, run_once: Callable) -> Any:
            return graph.capture(run_once)

    def init_device_graphs(runner: Any) -> None:
        runner.graph_runner, runner.graph_mem_usage = RehearsedGraphs(runner), 0

    model_runner.ModelRunner.init_device_graphs = init_device_graphs
    # It collects garbage twice, a second each in a process that has imported SGLang; what is captured here allows it.
    cuda_graph_runner.freeze_gc = lambda enable_cudagraph_gc: nullcontext()

    def init_piecewise_cuda_graphs(runner: Any) -> None:
        off = runner.server_args.disable_piecewise_cuda_graph
        runner.piecewise_cuda_graph_runner = None if off else RecordedPrefill(runner)

    model_runner.ModelRunner.init_piecewise_cuda_graphs = init_piecewise_cuda_graphs


class RecordedGraph:
    """A decode step of one batch size."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def capture(self, run_once: Callable) -> Any:
        self._run_once, self._with = run_once, in_force(self._runner)
        self._output = run_once()
        self._said = False
        say("capture", self._batch())
        return self._output

    def replay(self) -> Any:
        check(self._with, in_force(self._runner))
        found = self._run_once()
        self._output.next_token_logits.copy_(found.next_token_logits)
        if self._output.hidden_states is not None:
            self._output.hidden_states.copy_(found.hidden_states)
        if not self._said:
            self._said = True
            say("replay", self._batch())
        return self._output

    def _batch(self) -> int:
        return len(self._output.next_token_logits)


class GarbageSaver:
    """The memory saver: what is paused is lost."""

    enabled = True

    def __init__(self, runners: list[Any]) -> None:
        self._runners = runners

    def pause(self, tag: str) -> None:
        (runner,) = self._runners
        pool, model = runner.token_to_kv_pool, runner.pat_loaded_model
        weights = [*model.parameters(), *model.buffers()]
        for tensor in {"kv_cache": [*pool.k_buffer, *pool.v_buffer], "weights": weights}[tag]:
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)

    def resume(self, tag: str) -> None: ...

    def region(self, *args: Any, **kwargs: Any) -> Any:
        return nullcontext()

    cuda_graph = disable = configure_subprocess = region


def rehearse_memory_saver() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter, _TorchMemorySaverAdapterNoop

    runners: list[Any] = []
    load = ModelRunner.load_model

    def load_model(runner: Any) -> None:
        load(runner)
        runner.pat_loaded_model = runner.model
        runners.append(runner)

    ModelRunner.load_model = load_model
    saver = GarbageSaver(runners)
    TorchMemorySaverAdapter.create = staticmethod(lambda enable: saver if enable else _TorchMemorySaverAdapterNoop())


class RecordedPrefill:
    """SGLang's graphs for prefill: pieces of the model that there was when they were captured."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._with = runner, in_force(runner)

    def can_run(self, batch: Any) -> bool:
        return True

    can_run_graph = can_run

    def execute(self, batch: Any, **kwargs: Any) -> Any:
        check(self._with, in_force(self._runner))
        return self._runner.eager_runner.execute(batch)

    def replay(self, batch: Any, **kwargs: Any) -> Any:
        check(self._with, in_force(self._runner))
        self._runner.attn_backend.init_forward_metadata(batch)
        return self._runner.model.forward(batch.input_ids, batch.positions, batch, **kwargs)


def check(captured: dict[str, Any], now: dict[str, Any]) -> None:
    other = sorted(name for name in now.keys() | captured.keys() if now.get(name) != captured.get(name))
    if other:
        raise RuntimeError(f"a graph of tp={captured['tp']} is replayed where others are in force: {other[:5]}")


def in_force(runner: Any) -> dict[str, Any]:
    """What a step of this runner reads now: objects by identity, tensors by address."""
    from sglang.srt.distributed import parallel_state

    found = {"tp": get_degree(), "model": id(runner.model), "attention backend": id(runner.attn_backend)}
    for name in ("_TP", "_ATTN_TP", "_MOE_TP"):
        found[f"group {name}"] = id(getattr(parallel_state, name))
    for name, module in runner.model.named_modules():
        pieces = getattr(getattr(module, "quant_method", None), "weights", ())
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False), *pieces]
        found |= {f"{name}[{i}]": (tensor.data_ptr(), tensor.stride()) for i, tensor in enumerate(tensors)}
    pool = runner.token_to_kv_pool
    found |= {f"KV[{i}]": (t.data_ptr(), t.shape) for i, t in enumerate([*pool.k_buffer, *pool.v_buffer])}
    found["request table"] = runner.req_to_token_pool.req_to_token.data_ptr()
    return found


def get_degree() -> int:
    from sglang.srt.distributed import parallel_state

    return parallel_state.get_tp_group().world_size


def say(event: str, batch: int) -> None:
    path = Path(os.environ[ENV]) / f"{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"event": event, "tp": get_degree(), "batch": batch}) + "\n")


def graphs_of_one_layout() -> None:
    """All layouts decode with the base layout's graphs."""
    from sglang_pat.host import adapter
    from sglang_pat.rank.layouts import Layouts

    install, name = Layouts.install, adapter.rank.GRAPHS

    def careless(self: Layouts, layout: Any) -> Any:
        kept = getattr(self.runner, name) if self.current.layout != layout else self[layout].parts.graph_runner
        runtime = install(self, layout)
        setattr(self.runner, name, kept)
        return runtime

    Layouts.install = careless


def prefill_graphs() -> None:
    """Prefill has graphs, as it has in stock SGLang."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    if hasattr(ModelRunner, "init_cuda_graphs"):
        begin = ModelRunner.init_cuda_graphs

        def with_prefill(runner: Any, *args: Any, **kwargs: Any) -> None:
            begin(runner, *args, **kwargs)
            runner.prefill_cuda_graph_runner = RecordedPrefill(runner)

        ModelRunner.init_cuda_graphs = with_prefill
        return
    init = ModelRunner.init_piecewise_cuda_graphs

    def careless(runner: Any) -> None:
        runner.server_args.disable_piecewise_cuda_graph = False
        init(runner)

    ModelRunner.init_piecewise_cuda_graphs = careless


def moved_weights() -> None:
    """A layout's weights are placed anew although its graphs read them where they were."""
    from sglang_pat.rank.layouts import Layouts

    def careless(self: Layouts, layout: Any) -> None:
        if (views := self[layout].views) is not None:
            for parameter in self.base.model.parameters():
                parameter.data = parameter.data.clone()
            views.refresh()

    Layouts.prepare = careless


MISTAKES = {
    "graphs of one layout": graphs_of_one_layout,
    "prefill graphs": prefill_graphs,
    "moved weights": moved_weights,
}
