"""Layers streamed from host memory: the copies are ordered, with what computes, as they must be in any order of a GPU.

The stand-in for streams (``tests/rehearsal``) knows what is ordered before what, and makes copies late or early.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sglang_pat.host import adapter
from sglang_pat.memory.memory_plan import GIB
from sglang_pat.memory.shapes import ModelShape, read_config
from sglang_pat.testing import models
from stream_layers.judge_memory import FEWEST, PLACES, CannotStream, JudgeMemory, order_layers
from stream_layers.refusals import REFUSED

from ..rehearsal.stream_rehearsal import Race, Streams

pytestmark = pytest.mark.contract

LAYERS = 7


class Layer(torch.nn.Module):
    """A layer of another size than the one before it, as no layers of a real model are."""

    def __init__(self, number: int, streams: Streams) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(5, 5, generator=generator).t(), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(5 + number % 2, generator=generator), requires_grad=False)
        self.streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.streams.use(self.weight)
        self.streams.use(self.bias)
        return torch.tanh(x @ self.weight) + self.bias[:5]


@pytest.fixture(params=["late", "early"])
def streams(request, monkeypatch) -> Streams:
    from stream_layers import layers

    found = Streams(late=request.param == "late")
    monkeypatch.setattr(layers, "get_device_module", lambda device: found)
    return found


def build(count: int, streams: Streams, kind: type | None = None) -> tuple[list[Layer], torch.nn.Module]:
    from stream_layers.layers import StreamedLayers

    streamed = (kind or StreamedLayers)(order_layers(count, LAYERS), count, "cpu")
    made = streamed.wrap_modules(Layer(number, streams) for number in range(LAYERS))
    streamed.post_init()
    return made, streamed


def run(layers: list[Layer], steps: int = 3) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        x = torch.full((2, 5), 0.1 * step)
        for layer in layers:
            x = layer(x)
        found.append(x)
    return found


def make_resident(streams: Streams) -> list[Layer]:
    return [Layer(number, streams) for number in range(LAYERS)]


@pytest.mark.parametrize("count", range(PLACES + 1, LAYERS + 1))
def test_each_layer_is_there_when_it_is_computed(count, streams):
    layers, _ = build(count, streams)
    for got, want in zip(run(layers), run(make_resident(streams)), strict=True):
        assert torch.equal(got, want)


def careless(mistake: str) -> type:
    """Streamed layers that lack one of their waits."""
    from stream_layers.layers import StreamedLayers

    class Careless(StreamedLayers):
        def _await_copy(self, *args):
            if mistake != "computes at once":
                super()._await_copy(*args)

        def _free_place(self, number, *_):
            if mistake == "copies at once" and number + PLACES < len(self._layers):
                self._start_copy(number + PLACES)
            elif mistake != "copies at once":
                super()._free_place(number)

        def _begin_step(self, *_):
            if mistake == "begins at once":
                for number in range(PLACES):
                    self._start_copy(number)
            else:
                super()._begin_step()

    return Careless


@pytest.mark.parametrize(
    "mistake,what",
    [
        ("computes at once", "computed before its copy is over"),
        ("copies at once", "overwritten before it is computed"),
        ("begins at once", "overwritten before it is computed"),
    ],
)
def test_a_wait_that_lacks_is_found_out(mistake, what, streams):
    layers, _ = build(5, streams, careless(mistake))
    with pytest.raises(Race, match=what):
        run(layers)


COUNTS = [0, *range(FEWEST, LAYERS + 1)]


@pytest.mark.parametrize("seed", range(3))
def test_other_layers_are_streamed_between_two_steps(seed, streams):
    draw = random.Random(seed)
    layers, streamed = build(draw.choice(COUNTS), streams)
    want = run(make_resident(streams))
    for count in [draw.choice(COUNTS) for _ in range(12)]:
        streamed.stream(count)
        assert streamed.count == count
        assert all(torch.equal(a, b) for a, b in zip(run(layers), want, strict=True))


def test_layers_change_when_nothing_runs(streams, monkeypatch):
    from stream_layers.layers import HostLayer

    layers, streamed = build(4, streams)
    place_in, placed = HostLayer.place_in, []

    def look(self, place):
        placed.append(streams.is_idle())
        place_in(self, place)

    monkeypatch.setattr(HostLayer, "place_in", look)
    for count in (6, 3, 0):
        run(layers)
        assert not streams.is_idle()
        streamed.stream(count)
    assert placed and all(placed)


def test_layers_for_which_there_is_no_room_stay_in_host_memory(streams, monkeypatch):
    layers, streamed = build(6, streams)
    monkeypatch.setattr(torch, "empty", Mock(side_effect=[torch.empty(512, dtype=torch.uint8), torch.OutOfMemoryError]))
    addresses = [p.data_ptr() for layer in layers for p in layer.parameters()]
    streamed.stream(3)
    assert streamed.count == 6
    assert [p.data_ptr() for layer in layers for p in layer.parameters()] == addresses


def test_a_step_that_fails_leaves_nothing_behind(streams):
    layers, _ = build(5, streams)
    want = run(make_resident(streams))
    for failing in range(LAYERS):
        hook = layers[failing].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(layers)
        hook.remove()
        assert all(torch.equal(a, b) for a, b in zip(run(layers), want, strict=True))


def test_addresses_never_change(streams):
    """A CUDA graph has the addresses inside."""
    layers, streamed = build(5, streams)
    addresses = [p.data_ptr() for layer in layers for p in layer.parameters()]
    assert len(set(addresses)) == 2 * (LAYERS - 5) + 2 * PLACES
    run(layers)
    with streamed.in_host_memory():
        pass
    run(layers)
    assert [p.data_ptr() for layer in layers for p in layer.parameters()] == addresses


def test_new_weights_are_written_to_host_memory(streams):
    layers, streamed = build(5, streams)
    other = make_resident(streams)
    for layer in other:
        layer.weight.data.mul_(1.5)
    run(layers)
    with streamed.in_host_memory():
        with streamed.in_host_memory():
            pass
        for layer, new in zip(layers, other, strict=True):
            for target, source in zip(layer.parameters(), new.parameters(), strict=True):
                target.data.copy_(source)
    assert all(torch.equal(a, b) for a, b in zip(run(layers), run(other), strict=True))


def test_sglang_has_all_arguments_that_are_refused():
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__dataclass_fields__", None) or ServerArgs.__struct_fields__
    assert {field for field, _, _ in (*REFUSED, *adapter.streaming.REFUSED)} - {*fields} == set()


def read_engine(args, monkeypatch):
    """Read the arguments of an engine as a rank does."""
    from sglang.srt import server_args

    if adapter.FOLDER == "v0_5_12":
        monkeypatch.setattr(server_args, "_global_server_args", args)
    else:
        from sglang.srt.arg_groups.overrides import model_config_of

        args.resolve_once()
        monkeypatch.setattr(adapter.streaming, "get_server_args", lambda: args)
        monkeypatch.setattr(adapter.streaming, "process_model_config", lambda: model_config_of(args))
        monkeypatch.setattr(adapter.streaming, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=False))
    return adapter.streaming.read_engine()


def count_streamed(model, monkeypatch, setting: str, free: float, **given) -> int:
    """Count the layers that a rank streams with ``free`` GiB before its model is there."""
    import sglang.srt.utils
    from sglang.srt.distributed import parallel_state
    from sglang.srt.server_args import ServerArgs

    from stream_layers.attach import make_offloader

    monkeypatch.setenv("SGLANG_PAT_STREAM_LAYERS", setting)
    monkeypatch.setattr(sglang.srt.utils, "get_available_gpu_memory", lambda *_, **__: free)
    world = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    on_cpu = dict(device="cpu", attention_backend="torch_native", dtype="float32", mem_fraction_static=0.5)
    args = ServerArgs(model_path=str(model), **on_cpu | given)
    return make_offloader(read_engine(args, monkeypatch)).start


def test_auto_follows_memory_and_the_longest_sequence(tmp_path, monkeypatch):
    model = models.make_random("llama", tmp_path / "llama", layers=LAYERS)
    shape = ModelShape.from_config(read_config(str(model)), "float32")
    layer, whole, token = (size / GIB for size in (shape.layer_bytes(1), shape.weight_bytes(1), shape.kv_bytes(1)))

    def count(free: float, **given) -> int:
        return count_streamed(model, monkeypatch, "auto", 2 * free, **given)

    fits = whole + 4096 * token
    assert count(1.001 * fits) == 0
    assert count(fits - 0.5 * layer) == 3
    assert count(fits - 1.5 * layer) == 4
    assert count(fits - 1.5 * layer, context_length=2048) == 0
    assert count(fits - 1.5 * layer, max_total_tokens=4096, max_running_requests=9) == 4
    assert count(fits + 4096 * token - 1.5 * layer, max_running_requests=2) == 4
    assert count_streamed(model, monkeypatch, "6", 0.0) == 6
    with pytest.raises(SystemExit):
        monkeypatch.setattr("os.kill", lambda *_: None)
        count(0.0)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "olmo2"])
@pytest.mark.parametrize("count", [3, 5, LAYERS])
def test_bytes_on_the_device_are_as_planned(arch, count, monkeypatch):
    """The plan leaves out biases and norms; SGLang's own layers are as large as transformers'."""
    from stream_layers.layers import StreamedLayers

    config = models.make_config(arch, layers=LAYERS, hidden=256, intermediate=512, vocab=64)
    config._attn_implementation = "eager"
    whole = models.load_transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    streamed = StreamedLayers(order_layers(count, LAYERS), count, "cpu")
    made = streamed.wrap_modules(iter(whole.model.layers))
    streamed.post_init()
    shape = ModelShape.from_config(config.to_dict(), "float32")
    plan = JudgeMemory(shape=shape, tp=1, budget=0, tokens=0)
    tables = shape.weight_bytes(1) - LAYERS * shape.layer_bytes(1)
    for now in (count, *COUNTS):
        streamed.stream(now)
        assert streamed.resident_bytes == pytest.approx(plan.count_weight_bytes(now) - tables, rel=0.005)
        assert streamed.host_bytes == pytest.approx(now * shape.layer_bytes(1), rel=0.005)
        alive = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in made for p in m.parameters()}
        # Nothing else keeps a layer on the device; one that came back is aligned.
        assert sum(alive.values()) == pytest.approx(streamed.resident_bytes, rel=0.001)


def test_layers_are_found_that_sglang_makes_otherwise(streams):
    from stream_layers.layers import StreamedLayers

    streamed = StreamedLayers((1, 2, 3, 0, 4, 5, 6), 3, "cpu")
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(make_resident(streams))})
    model["others"] = torch.nn.ModuleList([torch.nn.Identity()])
    for _ in range(2):
        streamed.find_layers(model)
    streamed.post_init()
    assert all(torch.equal(a, b) for a, b in zip(run(model["layers"]), run(make_resident(streams)), strict=True))


def test_a_model_without_such_layers_is_refused(streams):
    from stream_layers.layers import StreamedLayers

    streamed = StreamedLayers((1, 2, 3, 0, 4, 5, 6), 3, "cpu")
    streamed.find_layers(torch.nn.ModuleList(make_resident(streams)[:-1]))
    with pytest.raises(CannotStream, match="this model has no list of 7 layers; choose another model"):
        streamed.post_init()


def test_a_second_kind_of_layers_is_refused(streams):
    _, streamed = build(5, streams)
    with pytest.raises(CannotStream, match="layers of two kinds"):
        streamed.wrap_modules(iter([]))


def test_a_loader_that_puts_other_tensors_there_is_refused(streams):
    from stream_layers.layers import StreamedLayers

    streamed = StreamedLayers((0, 1, 2), 3, "cpu")
    made = streamed.wrap_modules(Layer(number, streams) for number in range(3))
    made[1].weight.data = made[1].weight.data.clone()
    with pytest.raises(CannotStream, match="the loader moved the model's weights"):
        streamed.post_init()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["--stream-layers", "SGLANG_PAT_STREAM_LAYERS"])
@pytest.mark.parametrize("when", ["arguments are read", "arguments are checked"])
def test_what_sglang_refuses_is_refused_in_one_line(monkeypatch, way, when):
    """A model that is not there, a speculative algorithm without a GPU; a number of layers in the variable."""
    from sglang.srt import server_args

    from sglang_pat import launch_server

    def refuse(*_):
        raise CannotStream("two lines") if when == "arguments are checked" else AssertionError("two\nlines")

    monkeypatch.setattr(server_args, "prepare_server_args", refuse)
    run = refuse if when == "arguments are checked" else lambda *_, **__: server_args.prepare_server_args([])
    monkeypatch.setattr(launch_server.runpy, "run_module", lambda *_, **__: run())
    monkeypatch.setattr(launch_server.shim, "ensure", lambda **_: None)
    monkeypatch.setattr("sys.argv", ["launch_server"])
    monkeypatch.setenv("SGLANG_PAT_STREAM_LAYERS", "5")
    if way.startswith("--"):
        monkeypatch.delenv("SGLANG_PAT_STREAM_LAYERS")
    with pytest.raises(SystemExit) as ended:
        launch_server.main(["--model-path", "no/such-model"] + ([way, "5"] if way.startswith("--") else []))
    assert str(ended.value) == "error: two lines"
