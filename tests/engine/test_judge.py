"""A plain engine that streams layers from host memory answers as one whose layers are resident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_pat.memory.shapes import ModelShape, read_config
from sglang_pat.testing import models
from sglang_pat.testing.server import Server, ServerDied
from stream_layers.judge_memory import JudgeMemory

from .conftest import GRAPH_SIZES, MODELS, long

LAYERS = 7
GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
BODIES = [{"input_ids": [7 + i, 8, *range(20, 40 + 9 * i)], "sampling_params": GREEDY} for i in range(5)]
SHOWS = {"return_logprob": True, "logprob_start_len": 0}


def make_models(arch: str) -> list[Path]:
    """Two, of other weights than each other."""
    return [models.make_random(arch, MODELS / f"{arch}-7-{seed}", layers=LAYERS, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def seven():
    return make_models("llama")


def stream(servers, model, count: int | str, order: str, *flags: str) -> Server:
    """A judge on a CPU, whose copies are made as ``order`` says; decode steps are graphs (``tests/rehearsal``).

    With ``auto``, and a seed in ``order``, other layers are streamed in every fourth turn of the ranks' loop.
    """
    env = servers.rehearsal | {"STREAM_REHEARSAL": order}
    if "--tp" in flags:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    return servers.get(model, "--stream-layers", str(count), GRAPH_SIZES, "1", "2", "4", *flags, env=env)


def answer(server: Server) -> tuple[list[list[int]], list[float]]:
    """Tokens, and the logprobs of prompts."""
    answers = server.generate(BODIES)
    scored = server.generate([body | SHOWS for body in BODIES[:2]])
    logprobs = [token[0] for a in scored for token in a["meta_info"]["input_token_logprobs"][1:]]
    return [a["output_ids"] for a in answers], logprobs


def load(server: Server, model) -> None:
    """Update the weights.  The cache is flushed by itself, with time to wait: at once SGLang (0.5.23) refuses it while
    requests that have just been answered are still in its batch."""
    body = {"model_path": str(model), "flush_cache": False}
    assert server.post("/update_weights_from_disk", body).json()["success"]
    assert server.post("/flush_cache?timeout=30").status_code == 200


@pytest.mark.parametrize(
    "arch,count,order,flags",
    [
        long("llama", 5, "late", ()),
        ("llama", "auto", "late 1", ()),
        long("granite", LAYERS, "early", ("--tp", "2")),  # SGLang makes its layers without make_layers
        long("granite", "auto", "early 2", ("--tp", "2")),
    ],
)
def test_answers_are_those_of_a_resident_model_before_and_after_an_update(servers, arch, count, order, flags):
    first, second = make_models(arch)
    resident, judge = servers.get(first), stream(servers, first, count, order, *flags)
    for model in (first, second, first):
        load(resident, model)
        load(judge, model)
        (tokens, logprobs), (wanted, wanted_logprobs) = answer(judge), answer(resident)
        assert tokens == wanted
        assert logprobs == pytest.approx(wanted_logprobs, rel=1e-4, abs=1e-4)
    resident_layers = judge.get("/server_info").json()["internal_states"][0]["resident_layers"]
    changes = find_changes(judge)
    if count == "auto":
        assert len(changes) >= 15 and len({now for now, _ in changes}) > 3
        assert resident_layers in {now for now, _ in changes}
    else:
        assert not changes and resident_layers == LAYERS - count


def find_changes(judge: Server) -> list[tuple[int, int]]:
    """Layers that were resident then, and before."""
    found = re.findall(r"(\d+) layers are resident \(before: (\d+)\)", judge.log_text())
    return [(int(now), int(before)) for now, before in found]


def test_the_log_says_the_bytes_that_were_planned(servers, seven):
    log = stream(servers, seven[0], 5, "late").log_text()
    found = re.search(
        r"(\d+) of 7 layers are streamed from ([\d.]+) MiB of host memory; ([\d.]+) MiB of layers are on", log
    )
    shape = ModelShape.from_config(read_config(str(seven[0])), "float32")
    plan = JudgeMemory(shape=shape, tp=1, budget=0, tokens=0)
    layer, tables = shape.layer_bytes(1), shape.weight_bytes(1) - LAYERS * shape.layer_bytes(1)
    assert found[1] == "5"
    assert float(found[2]) == pytest.approx(5 * layer / 2**20, abs=0.02)
    assert float(found[3]) == pytest.approx((plan.count_weight_bytes(5) - tables) / 2**20, abs=0.02)


def test_too_little_memory_ends_the_start_in_one_line(servers, seven):
    with pytest.raises(ServerDied) as died:
        Server(seven[0], "--stream-layers", "auto", max_total_tokens=1 << 40, prefork=servers.prefork)
    log = str(died.value)
    assert f"--stream-layers auto: with all {LAYERS} layers in host memory there is room for" in log
    assert "Traceback" not in log


def test_what_cannot_be_streamed_is_refused_in_one_line(servers, seven):
    with pytest.raises(ServerDied) as died:
        Server(seven[0], "--stream-layers", "5", "--cpu-offload-gb", "1", prefork=servers.prefork)
    line = "error: --stream-layers does not support --cpu-offload-gb 1: both keep weights in host memory; leave one out"
    assert str(died.value).rstrip().endswith(line) and "Traceback" not in str(died.value)
