"""Our arguments among OpenRLHF's; nothing of OpenRLHF is needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_pat.integrations import CALLS
from sglang_pat.integrations.openrlhf.__main__ import RESPONSE, WHOLE, _check_lengths, _read_as_openrlhf, main, split
from sglang_pat.integrations.openrlhf.given import GivenArguments
from sglang_pat.integrations.openrlhf.launcher import Launcher

ROOT = Path(__file__).resolve().parents[2]


def test_ours_are_taken_out():
    given, rest = split(
        [
            "--vllm.num_engines", "1", "--sglang_pat.policy", "pat", "--train.colocate_all", "--sglang.device=cpu",
            "--sglang.max_total_tokens", "4096", "--sglang.enable_memory_saver", "False", "--sglang_pat.switch_at=-1",
        ]
    )  # fmt: skip
    assert given.pat == {"policy": "pat", "switch_at": "-1"}
    assert given.sglang == {"device": "cpu", "max_total_tokens": 4096, "enable_memory_saver": False}
    assert rest == ["--vllm.num_engines", "1", "--train.colocate_all"]


@pytest.mark.parametrize("argv", [["--sglang_pat.policy"], ["--sglang_pat.policy", "--train.colocate_all"]])
def test_a_value_that_lacks(argv):
    with pytest.raises(ValueError, match="^--sglang_pat.policy needs a value: --sglang_pat.policy VALUE$"):
        split(argv)


TP8 = ["--vllm.tensor_parallel_size", "8"]


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--sglang_pat.polcy", "pat"], "--sglang_pat has no setting 'polcy' (did you mean 'policy'?); choose from"),
        (["--sglang_pat.policy", "survivl"], "--sglang_pat: --pat-policy 'survivl': choose one of survival, pat"),
        (["--sglang_pat.log=/nowhere/log.jsonl"], "--sglang_pat: --pat-log /nowhere/log.0.jsonl: No such file"),
        (
            ["--sglang_pat.base_tp", "3", *TP8],
            "--sglang_pat: base_tp is 3, must divide the engine's 8 GPUs: 1, 2, 4, 8",
        ),
        (["--sglang_pat.base_tp", "3", "=".join(TP8)], "--sglang_pat: base_tp is 3, must divide the engine's 8 GPUs"),
        (["--sglang.page_size", "16"], "--sglang.page_size is 16, which an adaptive engine does not support"),
        (
            ["--rollout.max_new_tokens", "8192"],
            "--rollout.max_new_tokens is 8192, must be less than --data.max_len (2048), the length of a prompt and",
        ),
    ],
)
def test_a_wrong_setting_ends_it_before_anything_starts(argv, line):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert str(ended.value).startswith(f"error: {line}") and "\n" not in str(ended.value)


def test_so_does_a_model_that_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["OlmoeForCausalLM"], "num_experts": 8}')
    with pytest.raises(SystemExit, match=f"^error: --actor.model_name_or_path {tmp_path}: an adaptive engine does not"):
        main(["--actor.model_name_or_path", str(tmp_path)])


def test_the_job_for_gpus_leaves_room_for_prompts():
    argv = re.findall(r"[^\s\\\"]+", (ROOT / "examples/openrlhf_grpo/run_gpu.sh").read_text().replace("$GPUS", "8"))
    found = _read_as_openrlhf(argv)
    assert (found[RESPONSE], found[WHOLE]) == (8192, 10240)
    _check_lengths(found[RESPONSE], found[WHOLE])


@pytest.mark.parametrize(
    "variable, line",
    [
        ("yes", "SGLANG_PAT='yes': write settings as name=value"),
        ("policy=survival", "--sglang_pat: --pat-policy survival needs a profile"),
    ],
)
def test_so_does_one_of_the_variable(variable, line, monkeypatch):
    monkeypatch.setenv("SGLANG_PAT", variable)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert str(ended.value).startswith(f"error: {line}") and "\n" not in str(ended.value)


def test_arguments_go_before_the_variable(monkeypatch):
    monkeypatch.setenv("SGLANG_PAT", "base_tp=2,policy=pat")
    given, _ = split(["--sglang_pat.policy", "threshold"])
    assert given.pat == {"base_tp": "2", "policy": "threshold"}


def test_each_engine_writes_its_own_log(monkeypatch):
    """Engines of one GPU have no list of bundles, and those of several may have interleaved ones.  Of each, the actor
    takes more calls at once than Ray's 1,000, which pauses and updates would wait for, too."""
    made = []
    actor = SimpleNamespace(
        options=lambda **options: SimpleNamespace(remote=lambda **given: made.append(given | {"options": options}))
    )
    name = "sglang_pat.integrations.openrlhf.actor"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(RolloutActor=actor))
    launcher = Launcher(GivenArguments(pat={"log": "/tmp/decisions.jsonl", "kv": "auto"}))
    for bundles in (None, None, [0, 2, 4, 6], [1, 3, 5, 7]):
        launcher.options(num_gpus=1).remote(tensor_parallel_size=len(bundles or [0]), bundle_indices=bundles)
    logs = [one["job_arguments"].pat["log"] for one in made]
    assert logs == [f"/tmp/decisions.{number}.jsonl" for number in range(4)]
    assert all(one["options"] == {"num_gpus": 1, "max_concurrency": CALLS} for one in made)
