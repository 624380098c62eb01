"""``SGLANG_PAT``: stock arguments of SGLang become those of an adaptive engine, in a process that asks for it."""

import json
import os
import subprocess
import sys

import pytest

from sglang_pat.settings import BASE_TP, SETTINGS
from sglang_pat.testing.prefork import run

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def found(model, prefork):
    done = run(prefork, "tests.contract.attach_cases", [str(model)], os.environ, 300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("when", ["early", "late"])
def test_arguments_become_adaptive(found, when):
    told = found[when]
    assert told["adaptive"] and (told["tp"], told["dp"]) == (4, 1)
    assert told["base"] == "tp2×dp2"
    assert (told["policy"], told["requests"]) == ("manual", 7)


def test_made_before_or_after_they_are_the_same(found):
    assert {**found["early"], "stream": None} == {**found["late"], "stream": None}


def test_a_field_changed_meanwhile_counts(found):
    assert found["late"]["stream"] == 3


def test_the_second_check_changes_nothing(found):
    assert found["again"]


def test_what_an_adapter_attached_stays_when_the_plugin_is_loaded(found):
    assert found["kept"]["base"] == "tp2×dp2" and found["kept"]["policy"] == "manual"


def test_replicas_that_were_asked_for_are_the_base_layout(found):
    assert found["replicas"]["base"] == "tp1×dp4"


def test_sockets_are_private(found):
    sockets = [value for name, value in found["sockets"].items() if name.endswith("ipc_name") and value]
    folders = {os.path.dirname(socket) for socket in sockets}
    assert len(folders) == 1
    assert all("sglang_pat" in folder for folder in folders)


def test_refusals_are_those_of_the_engine(found):
    assert found["base_tp"] == "here: base_tp is 2, must divide the engine's 3 GPUs: 1, 3"
    assert found["flag"].startswith("--adaptive-tp does not support --quantization fp8")


def plugin(value: str | None) -> subprocess.CompletedProcess:
    environment = {name: text for name, text in os.environ.items() if name != "SGLANG_PAT"}
    if value is not None:
        environment["SGLANG_PAT"] = value
    code = "import json, sys; from sglang_pat.plugin import plugin; plugin(); print(json.dumps(list(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_without_the_variable_nothing_is_imported():
    run = plugin(None)
    assert run.returncode == 0
    ours = {name for name in json.loads(run.stdout) if name.startswith("sglang")}
    assert ours == {"sglang_pat"} | {f"sglang_pat.{name}" for name in ("config", "layout", "plugin", "version")}


@pytest.mark.parametrize("value", ["yes", "polcy=pat", "switch_at=soon"])
def test_it_fails_closed(value):
    run = plugin(value)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("error: SGLANG_PAT")


def test_every_setting_is_a_field_of_the_arguments():
    from sglang_pat.host import adapter
    from sglang_pat.host.arguments import INTERNAL, AdaptiveServerArgs

    fields = adapter.arguments.get_fields(AdaptiveServerArgs(model_path="none"))
    ours = {name: value for name, value in fields.items() if name.startswith("pat_") and name not in INTERNAL}
    assert ours == {setting.field: setting.default for setting in SETTINGS}
    assert BASE_TP.field not in fields


@pytest.mark.parametrize("what", ["scheduler", "detokenizer"])
def test_functions_that_would_not_be_called_are_refused(what, model, monkeypatch):
    """AReaL's launcher and ROLL give their own; verl gives SGLang's."""
    from sglang.srt.entrypoints import engine

    from sglang_pat.host.arguments import make_arguments
    from sglang_pat.launch import processes
    from sglang_pat.server.engine import AdaptiveEngine

    def areal_run_scheduler_process(*_):
        raise AssertionError

    started = []
    monkeypatch.setattr(processes, "end_children", lambda: started.append("ended"))
    monkeypatch.setattr("sglang_pat.host.engine.start", lambda name, *_: started.append(name) or (None, None))
    args = make_arguments(model_path=str(model), tp_size=1, dp_size=2, adaptive_tp=True)
    line = f"^run_{what}_process_func is tests.contract.test_attach.*areal_run.*: an adaptive engine starts .* itself"
    with pytest.raises(ValueError, match=line):
        if what == "scheduler":
            AdaptiveEngine._launch_scheduler_processes(args, None, areal_run_scheduler_process)
        else:
            AdaptiveEngine._launch_detokenizer_subprocesses(args, None, areal_run_scheduler_process)
    assert started == ([] if what == "scheduler" else ["ended"])
    AdaptiveEngine._launch_detokenizer_subprocesses(args, None, engine.run_detokenizer_process)
    assert started[-1] == "the detokenizer"


def test_the_entry_point_is_registered():
    from importlib.metadata import entry_points

    (entry,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "sglang_pat"]
    assert entry.value == "sglang_pat.plugin:plugin"


def test_sglang_loads_plugins_before_what_we_patch():
    """Where SGLang loads them inside its launch code, arguments are converted just after."""
    import inspect

    from sglang.srt.entrypoints.engine import Engine

    source = inspect.getsource(Engine._launch_subprocesses)
    order = [
        "load_plugins()", "check_server_args()", "PortArgs.init_new(", "cls._launch_scheduler_processes(",
        "cls._launch_detokenizer_subprocesses(", "init_tokenizer_manager_func(\n",
    ]  # fmt: skip
    places = [source.index(step) for step in order]
    assert places == sorted(places)
