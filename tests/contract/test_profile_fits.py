"""``--pat-profile`` and ``--pat-log`` at start: what fits, and one line for what does not."""

from __future__ import annotations

import functools

import pytest

from profiler import sweep, validate
from sglang_pat.launch_server import launch
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import DecodePoint, Profile, SwitchSample
from sglang_pat.tools.commands import run

from . import checkpoints
from .checkpoints import MIXTURES, write_mixture_config

pytestmark = pytest.mark.contract


arguments = functools.partial(checkpoints.arguments, dtype="float32")


@pytest.fixture(scope="module")
def profile(model, tmp_path_factory):
    from sglang_pat.host.arguments import make_fingerprint

    path = tmp_path_factory.mktemp("profile") / "llama.json"
    decode = [DecodePoint(tp=tp, replicas=2 // tp, batch=1, context=64, seconds=0.01, samples=(0.01,)) for tp in (1, 2)]
    phases = {"drain": 0.001, "capsules": 0.004, "kv": 0.001, "install": 0.002}
    switches = [
        SwitchSample(
            from_tp=a, to_tp=3 - a, requests=n, tokens=99 * n, mode="migrate", moved_bytes=n, pause_seconds=0.01,
            prepare_seconds=0.0, phases=phases,
        )
        for a in (1, 2)
        for n in (0, 2)
    ]  # fmt: skip
    mark = make_fingerprint(arguments(model), arguments(model).read_config(), kv_tokens=4096, max_running=8)
    found = Profile(
        fingerprint=mark, complete=True, decode=tuple(decode), switches=tuple(switches),
        grid={"batch": [1], "context": [64]}, machine={"grid": ""},
    )  # fmt: skip
    profiles.save(found, path)
    return path


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_belong_to_a_deployment(tmp_path, kind):
    from sglang_pat.host.arguments import make_fingerprint

    def describe(**changes) -> str:
        folder = write_mixture_config(tmp_path / "_".join(changes), kind, **changes)  # SGLang remembers a folder's
        args = arguments(folder, skip_tokenizer_init=True)
        return make_fingerprint(args, args.read_config()).model

    width = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    experts = "num_local_experts" if kind == "mixtral" else "num_experts"
    changed = [describe(**{name: 16}) for name in (width, experts, "num_experts_per_tok")]
    assert len({describe(), *changed}) == 4


def check(args) -> None:
    from sglang_pat.host.arguments import make_spec

    make_spec(args)


def test_fits_and_means_survival(model, profile, tmp_path):
    """A profile fits where the pool differs, too.

    The pool bounded what was measured, and a GPU's differs from start to start.
    """
    args = arguments(model, pat_profile=str(profile), pat_log=str(tmp_path / "log"), max_total_tokens=12345)
    check(args)
    assert args.read_config().policy == "survival"
    assert arguments(model, pat_profile=str(profile), pat_policy="pat").read_config().policy == "pat"
    assert arguments(model).read_config().policy == "threshold"
    with pytest.raises(ValueError, match="--pat-policy survival needs a profile"):
        arguments(model, pat_policy="survival")


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(pat_log="/nowhere/log"), "--pat-log /nowhere/log"),
        (dict(dtype="bfloat16"), "dtype='float32', this deployment has 'bfloat16'"),
        (dict(dp_size=4), "num_ranks=2, this deployment has 4"),
        (dict(pat_candidates="1"), "degrees=(1, 2), this deployment has (1,)"),
    ],
)
def test_refused(model, profile, options, said):
    with pytest.raises(ValueError) as caught:
        check(arguments(model, pat_profile=str(profile), **options))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_another_link_is_refused(model, profile, monkeypatch):
    monkeypatch.setenv("SGLANG_PAT_LINK", "50:1")
    with pytest.raises(ValueError, match="link='none'"):
        check(arguments(model, pat_profile=str(profile)))


def test_the_command_says_it_in_one_line(model, profile, monkeypatch):
    monkeypatch.setattr("sglang_pat.launch.processes.fork_here", lambda: None)
    words = f"--model-path {model} --tp 1 --dp 2 --adaptive-tp --dtype bfloat16 --pat-profile {profile}".split()
    with pytest.raises(SystemExit, match="^error: .*dtype='float32'"):
        launch(words)


@pytest.mark.parametrize(
    "module, more, said",
    [
        (sweep, ["--grid", "batch=1"], "was measured with grid="),
        (sweep, ["--pat-weights", "reshard"], "weights='resident', this sweep has 'reshard'"),
        (sweep, ["--no-such-flag", "1"], "--no-such-flag"),
        (validate, ["--dtype", "bfloat16"], "dtype='float32', this deployment has 'bfloat16'"),
    ],
)
def test_the_profiler_refuses_another_deployment_before_it_starts_an_engine(model, profile, capsys, module, more, said):
    path, before = str(profile), profile.read_bytes()
    words = [path] if module is validate else ["--out", path]
    words += ["--model-path", str(model), "--tp", "1", "--dp", "2", "--dtype", "float32", *more]
    assert run("command", module.main, words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err and profile.read_bytes() == before
