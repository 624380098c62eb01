"""checkpoint-engine's updates (IPC): a bucket that does not fit, through SGLang's own code.  checkpoint-engine itself,
which needs CUDA, is made up: it hands over bucket after bucket, and ends an update with the first error of a rank."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_pat.cpu import shim

pytestmark = pytest.mark.contract

shim.ensure()
from sglang_pat.host import adapter  # noqa: E402
from sglang_pat.host.fixes import weight_updates as updates  # noqa: E402
from sglang_pat.host.scheduler import AdaptiveScheduler  # noqa: E402

Worker = adapter.runner.AdaptiveTpModelWorker
SHAPES = {"a": (2, 3), "b": (4,), "c": (5,)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.post_loads = 0

    def load_weights(self, weights) -> None:
        self.loaded += [name for name, _ in weights]

    def post_load_weights(self) -> None:
        self.post_loads += 1


def problem(tensors):
    wrong = [name for name, shape in tensors if SHAPES.get(name) != tuple(shape)]
    return f"{updates.REFUSED}: {wrong[0]} does not fit" if wrong else None


def make_updater(worker, runner, monkeypatch):
    """The function of SGLang's code that updates over IPC; returns success and message."""
    if adapter.FOLDER == "v0_5_12":
        from sglang.srt.model_executor.model_runner import ModelRunner

        runner.update_weights_from_ipc = lambda request: ModelRunner.update_weights_from_ipc(runner, request)
        return worker.update_weights_from_ipc
    from sglang.srt.model_executor.model_runner_components import weight_updater as component

    monkeypatch.setattr(component, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    monkeypatch.setattr(component, "_unsupported_derived_weight_cache_error", lambda model: None)
    named = dict.fromkeys(("tp_rank", "device", "gpu_id", "model_config", "custom_weight_loaders"))
    named |= dict.fromkeys(("update_model_fields", "recapture_cuda_graph"))
    runner.weight_updater = component.WeightUpdater(
        **named, get_model=lambda: runner.model, get_model_runner=lambda: runner
    )
    updater = make_component(worker)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)

    def update(request):
        answer = updater.update_weights_from_ipc(request)
        return answer.success, answer.message

    return update


def make_component(worker):
    """0.5.23's component that updates weights."""
    kind = adapter.components.MendedWeightUpdater
    made = kind.__new__(kind)
    made.tp_worker, made.draft_worker, made.metrics_collector, made.tp_cpu_group = worker, None, None, "group"
    made.scheduler = SimpleNamespace(
        count_update=lambda update, request: update(request), record_weight_version_change=lambda new_version: None
    )
    return made


@pytest.fixture
def rank(monkeypatch):
    """A rank's worker and model; ``buckets`` of the sender, by its handle."""
    engine = ModuleType("checkpoint_engine.worker")
    buckets = {}

    def update_weights_from_ipc(ctx, handle, device_id, *, run, post_hook):
        for bucket in buckets[handle]:
            try:
                run([(name, torch.zeros(shape)) for name, shape in bucket])
            except Exception as error:  # the sender hears of it, and tells all ranks
                raise RuntimeError(f"traceback ... {error}") from None
        post_hook()

    engine.update_weights_from_ipc = update_weights_from_ipc
    monkeypatch.setitem(sys.modules, "checkpoint_engine", ModuleType("checkpoint_engine"))
    monkeypatch.setitem(sys.modules, "checkpoint_engine.worker", engine)
    from sglang.srt.checkpoint_engine import checkpoint_engine_worker

    monkeypatch.setattr(checkpoint_engine_worker, "update_weights_from_ipc", update_weights_from_ipc)
    extension = checkpoint_engine_worker.SGLangCheckpointEngineWorkerExtensionImpl
    monkeypatch.setattr(extension, "get_device_uuid", lambda self: "GPU-0")
    monkeypatch.setattr(extension, "get_device_id", lambda self: 0)
    model = Model()
    runner = SimpleNamespace(model=model)
    worker = Worker.__new__(Worker)
    worker._model_runner, worker.expected = runner, SimpleNamespace(find_problem=problem)
    update_weights = make_updater(worker, runner, monkeypatch)

    def update(*given):
        buckets["here"] = given
        answer = update_weights(SimpleNamespace(zmq_handles={"GPU-0": "here"}, weight_version=None, flush_cache=False))
        assert runner.model is model, "the stand-in is gone"
        return answer

    return SimpleNamespace(model=model, update=update)


def test_all_buckets_are_loaded(rank):
    success, _ = rank.update([("a", (2, 3)), ("b", (4,))], [("c", (5,))])
    assert success and rank.model.loaded == ["a", "b", "c"] and rank.model.post_loads == 1


@pytest.mark.parametrize("wrong", [("b", (5,)), ("d", (4,))])
def test_a_first_bucket_that_does_not_fit_changes_nothing(rank, wrong):
    success, message = rank.update([("a", (2, 3)), wrong], [("c", (5,))])
    assert not success and message == f"{updates.REFUSED}: {wrong[0]} does not fit"
    assert not rank.model.loaded and not rank.model.post_loads


def test_a_later_one_ends_the_update_and_the_answer_says_that_weights_are_new(rank):
    success, message = rank.update([("a", (2, 3))], [("c", (5,)), ("b", (5,))])
    assert not success and message == f"{updates.BROKEN_OFF}: b does not fit"
    assert rank.model.loaded == ["a"] and not rank.model.post_loads


def test_errors_of_the_sender_are_told_as_they_are(rank):
    success, message = rank.update([("a", (2, 3))], [None])
    assert not success and "traceback" in message


def test_graphs_are_not_captured_again():
    """SGLang would make a graph runner that no layout knows of."""
    asked = SimpleNamespace(recapture_cuda_graph=True)
    if adapter.FOLDER == "v0_5_12":
        answer = AdaptiveScheduler.update_weights_from_disk(SimpleNamespace(), asked)
    else:
        answer = make_component(None).update_weights_from_disk(asked)
    assert not answer.success and answer.message.startswith("recapture_cuda_graph: not with --adaptive-tp")
