"""SGLang calls every function of ours that replaces one of its own: in a generation, a switch, an update, a pause.

What a new SGLang no longer calls is lost without an error: it fails here, by name.  Three functions are put in place
where there is a GPU, and are not seen: in that of ``RMSNorm.forward_cuda`` and ``fused_moe.invoke_fused_moe_kernel``
(float32), and of ``can_use_custom_all_reduce_with_nvlink`` (ranks that share it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sglang_pat.host.adapter import FOLDER
from sglang_pat.testing.server import Server

from . import called
from .called import Function
from .conftest import make_model
from .streams import Body, ask, body, check_idle, endless, hold, post, stream_across, through
from .weight_updates import Trainer, check_success, serialize

RANKS = 2
FLAGS = (
    "--enable-metrics --enable-return-routed-experts --enable-return-hidden-states --max-running-requests 2 "
    "--soft-watchdog-timeout 300"
).split()

NEW = FOLDER != "v0_5_12"
"""Whether updates are sessions, and other functions of SGLang's are replaced."""

UNCALLED = {
    "LaunchedEngine.shutdown": "a program calls it (test_python_api.py); a server ends by a signal",
    "Engine.__init__": "a program calls it (test_python_api.py)",
    "Engine.shutdown": "a program calls it (test_python_api.py)",
    "AdaptiveScheduler.get_init_info": "run_rank calls it, as SGLang's run_scheduler_process does in its place",
}
"""What SGLang does not call, and why it need not."""
if NEW:
    UNCALLED["StockExpertsTable.destroy"] = "SGLang calls it where a rank ends by itself; these are killed"

STAND_INS = {
    "AdaptiveScheduler.init_request_dispatcher.<locals>.<lambda>",
    "AdaptiveTokenizerManager._pat_reply",
    "AsyncOrderedReceiver.recv_pyobj",
    "CompiledGrammars._lookup",
    "ControlSender.send_output",
    "ExpectedWeights._record_expert_load",
    "ExpectedWeights._record_load",
    "Gate.wait_for",
    "IsolatingDispatcher.__call__",
    "OrderedReceiver.recv_pyobj",
    "OutputSender.send_output",
    "ReadableSocket.recv_pyobj",
    "Receiver.load_weights",
    "RpcRelay.recv_pyobj",
    "Table.__getitem__",
    "Table.__setitem__",
    "accept_trainer_names.<locals>.<lambda>",
} | (
    {"GuardedBatch.fill_vocab_mask_batched"}
    if NEW
    else {"GuardedGrammar.fill_vocab_mask", "OwnRows.__getitem__", "Overlaid.__getattr__"}
)
"""Functions of ours that an object of SGLang's holds, or of an object that it holds in place of SGLang's."""

MAKERS = ("__init__", "__post_init__")
"""Methods that whoever makes an object calls; that may be ourselves."""


def ask_for_everything() -> list[Body]:
    """Requests whose ways through SGLang differ; each lives through two switches."""
    experts = body(1, 40) | {"return_routed_experts": True}
    constrained = body(2, 40, regex="([a-f]{3}-){20}z", ignore_eos=False)
    penalised = body(3, 40, frequency_penalty=0.7, min_new_tokens=30, ignore_eos=False)
    scored = body(4, 40, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    bounded = body(5, 40, stop_regex=["[xyz]{9}"]) | {"return_hidden_states": True}
    return [experts, constrained, penalised, scored, bounded]


async def abort_and_pause(server: Server) -> None:
    """Some run, and some wait: of both a part is aborted by itself, the rest in a pause."""
    async with server.session() as session:
        work = await hold(server, session, [endless(i, rid=f"mine-{i}") for i in range(6)], step=5, tp=2)
        for i in (0, 5):
            assert await post(session, server, "/abort_request", {"rid": f"mine-{i}"}) == 200
        assert await post(session, server, "/pause_generation", {"mode": "retract"}) == 200
        assert await post(session, server, "/abort_request", {"abort_all": True}) == 200
        assert await post(session, server, "/continue_generation", {}) == 200
        await server.set_schedule(session)
        await asyncio.gather(*work, return_exceptions=True)  # one is refused: it has no token
    check_idle(server)


def update_weights(server: Server, model: Path) -> None:
    """All four ways, with the weights that the engine has.  IPC would need a GPU: it is refused, late."""
    state = load_file(model / "model.safetensors")
    check_success(server.post("/update_weights_from_disk", {"model_path": str(model)}))
    items = [serialize(list(state.items())) for _ in range(RANKS)]
    check_success(server.post("/update_weights_from_tensor", {"serialized_named_tensors": items}))
    trainer = Trainer(server, RANKS)
    try:
        check_success(trainer.broadcast({"model.norm.weight": state["model.norm.weight"]}))
    finally:
        trainer.close()
    if NEW:
        for path in ("/begin_weight_update", "/end_weight_update"):
            assert server.post(path, {}).status_code == 200
    assert not server.post("/update_weights_from_ipc", {"zmq_handles": {}}).json()["success"]


def use(server: Server, model: Path, folder: Path) -> None:
    """All that an engine does; at its end a rank fails."""
    through(server, ask_for_everything(), {10: 2, 20: 1})
    asyncio.run(stream_across(server, [body(6, 120)]))
    both = {"input_ids": [body(i)["input_ids"] for i in (7, 8)], "sampling_params": {"max_new_tokens": 4}}
    assert len(ask(server, "/generate", **both)) == 2
    asyncio.run(abort_and_pause(server))
    update_weights(server, model)
    for path in ("/pat/lend_ranks", "/pat/take_back_ranks"):
        ask(server, path)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert server.post(path, {}).status_code == 200
    assert server.post("/start_profile", {"output_dir": str(folder), "num_steps": 2, "activities": ["CPU"]}).ok
    ask(server, "/generate", **body(9, 8))
    assert server.get("/server_info").ok and server.get("/v1/loads").ok
    assert server.post("/open_session", {"capacity_of_str_len": 100, "session_id": "nobody"}).status_code >= 400
    server.find_rank_process(1).kill()
    server.process.wait(60)


@pytest.fixture(scope="module")
def functions(servers, tmp_path_factory) -> Mapping[Function, set[str]]:
    """Who called each of our functions in an engine that has done all that it can (:func:`called.read`)."""
    folder = tmp_path_factory.mktemp("called")
    model = make_model("qwen3_moe")
    environment = {called.ENV: str(folder / "functions")}
    server = servers.adaptive(model, RANKS, *FLAGS, env=environment, module="tests.engine.called")
    servers.give_away(server)
    with server:
        use(server, model, folder)
    assert not server.log.exists()
    return called.read(folder / "functions")


def is_reached(function: Function, words: set[str]) -> bool:
    """Whether SGLang calls it; by way of our override of it, where there is one."""
    callers = words - {*called.KINDS}
    is_ours_enough = called.INNER in words or function.name.rpartition(".")[2] in MAKERS
    return bool(callers if is_ours_enough else callers - {"sglang_pat"})


def test_sglang_calls_all_that_replaces_its_own(functions):
    """The list has nothing that is called, and nothing that replaces none."""
    replacing = {one: words for one, words in functions.items() if words & {*called.KINDS}}
    assert len(replacing) > 90
    unreached = {one.name for one, words in replacing.items() if not is_reached(one, words)}
    assert unreached ^ UNCALLED.keys() == set()


def test_what_was_put_in_place_of_functions_is_seen(functions):
    """Modules and classes of SGLang's: else the test above would say nothing of these."""
    put = {one.name for one, words in functions.items() if called.PUT in words}
    assert "make_watchdog" in put and "keep_experts.<locals>.release_req" in put, put


def test_sglang_calls_what_stands_in_for_its_objects(functions):
    """Each was written to an attribute; in another SGLang some component may have kept what was there before."""
    called_by_sglang = {one.name for one, words in functions.items() if "sglang" in words}
    assert STAND_INS - called_by_sglang == set()
