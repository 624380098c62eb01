"""The demonstration: its work, its contenders on a server that is none, what it says and writes."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import aiohttp
import psutil
import pytest

from sglang_pat.demo import __main__ as cli
from sglang_pat.demo import cases, contest
from sglang_pat.demo.contest import Answer, BatchRun, ContestResult, DemoError, StepTime, SwitchMark
from sglang_pat.predict.profile import save
from sglang_pat.testing.server import ServerDied
from sglang_pat.tools.cpu_share import Meter
from tests.unit.profiles_for_tests import profile

pytestmark = pytest.mark.unit

LOW, HIGH = "tp1×dp2", "tp2×dp1"
WORK = cases.LognormalBatch(4, 8, 1.0, 64)


def run(name, seconds, texts="abcd", **changes):
    answers = [Answer(seconds * (i + 1) / 4, 10, text) for i, text in enumerate(texts)]
    return BatchRun(**dict(contender=name, answers=answers, switches=[], others=0.25) | changes)


def result(*rounds):
    """Results of rounds of seconds: static tp1×dp2, static tp2×dp1, adaptive."""
    names = (f"static {LOW}", f"static {HIGH}", contest.ADAPTIVE)
    made = [[run(name, seconds) for name, seconds in zip(names, each, strict=True)] for each in rounds]
    return ContestResult([StepTime(1, {LOW: 0.06, HIGH: 0.04})], made)


def test_rounds_are_the_same_long_tailed_work_and_no_prompt_comes_twice():
    lengths = cases.LognormalBatch(128, 32, 1.0, 448, capped=0.02).compute_lengths()
    assert len(lengths) == 128 and 28 <= lengths[64] <= 36 and lengths[-3:] == [448] * 3 and min(lengths) >= 4
    rounds = [WORK.make_requests(number) for number in range(3)]
    assert len({body["text"] for bodies in rounds for body in bodies}) == 12 and rounds[1] == WORK.make_requests(1)
    for bodies in rounds:
        params = [body["sampling_params"] for body in bodies]
        assert sorted(p["max_new_tokens"] for p in params) == WORK.compute_lengths()
        assert {p["custom_params"]["pat_limit"] for p in params} == {64}, "policies are not told the lengths"
    params = [body["sampling_params"] for body in WORK.make_requests(0, tokens=4)]
    assert {(p["max_new_tokens"], p["custom_params"]["pat_limit"]) for p in params} == {(4, 4)}


def test_meter_tells_own_work_from_that_of_others():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(child.pid)
        mine, theirs = Meter([psutil.Process(), process]), Meter([psutil.Process()])
        before = process.cpu_times().user
        while process.cpu_times().user - before < 0.2:
            time.sleep(0.02)
        assert theirs.share() > mine.share()
    finally:
        child.kill()
        child.wait()


# -- contenders


class FakeServer:
    """Answers ``/generate``; the second response is one token short if ``short``."""

    def __init__(self, short=False):
        self.short, self.asked, self.reconfigured = short, 0, []
        self.process = SimpleNamespace(pid=psutil.Process().pid)
        self.session = aiohttp.ClientSession

    def list_children(self):
        return []

    def reconfigure(self, tp):
        self.reconfigured.append(tp)

    def status(self):
        made = [dict(started=time.time(), phases={"prepare": 0.5}, from_tp=1, to_tp=2, pause_seconds=0.1, requests=2,
                     tokens=5, error="")] * bool(self.asked)  # fmt: skip
        layout = {"tp": 1, "dp": 2}
        return dict(num_switches=len(made), layout=layout, base=layout, requests=0, switches=made)

    async def generate_one(self, session, body):
        self.asked += 1
        tokens = body["sampling_params"]["max_new_tokens"] - (self.short and self.asked == 2)
        return {"text": body["text"][-3:], "meta_info": {"completion_tokens": tokens}}


def test_a_contender_runs_a_batch():
    server = FakeServer()
    found = contest.Contender("adaptive", server, None).run(WORK.make_requests(0))
    assert found.tokens == sum(WORK.compute_lengths()) and server.reconfigured == []
    assert [(switch.to_tp, switch.requests, switch.pause) for switch in found.switches] == [(2, 2, 0.1)]
    contest.Contender(f"static {HIGH}", server := FakeServer(), contest.HIGH).run(WORK.make_requests(0))
    assert server.reconfigured == [2]
    with pytest.raises(DemoError, match="shorter or longer"):
        contest.Contender("adaptive", FakeServer(short=True), None).run(WORK.make_requests(0))


def test_a_dead_server_is_blamed_with_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("out of memory")
    dead = SimpleNamespace(process=SimpleNamespace(wait=lambda _: 1, poll=lambda: 1), log=log, log_text=log.read_text)

    def fail(error):
        raise error

    with pytest.raises(DemoError, match=r"(?s)the server died \(exit code 1\).*out of memory"):
        contest._call_with_server_log(dead, lambda: fail(ConnectionError("refused")))
    with pytest.raises(DemoError, match="gone"):
        contest._call_with_server_log(dead, lambda: fail(ServerDied("gone")))


# -- the command


def test_a_bad_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--only", "slow-link"])
    words = "--only, --model: the demonstration has one case; bench/rollout.py runs others"
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_rounds_end_with_the_time():
    more = cli.make_stop_rule(time.monotonic() + 100, 2, 4)
    assert more(1, 1e9) and more(2, 50.0) and not more(2, 200.0) and not more(4, 1.0)


@pytest.mark.parametrize(("adaptive", "said"), [(8.0, "1.25 times"), (10.1, "as fast as"), (12.5, "0.80 times")])
def test_headline(adaptive, said):
    found = cli.format_headline(result((10.0, 12.0, adaptive), (10.0, 12.0, adaptive), (99.0, 99.0, 99.0)))
    assert said in found and f"static {LOW}" in found and f"{12 / adaptive:.2f} times as fast as static {HIGH}" in found


def test_whole_command_with_rounds_given(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(cases.MAKERS, cases.TINY, lambda: tmp_path)
    monkeypatch.setattr(cli, "may_fork", lambda: False)
    save(profile(), tmp_path / "p.json")
    monkeypatch.setattr(contest, "sweep_profile", lambda *_: tmp_path / "p.json")
    given = result((10.0, 12.0, 8.0))
    monkeypatch.setattr(contest, "run_rounds", lambda *_: given.rounds)
    assert cli.main(["--quick", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "1.25 times as fast" in said and "texts equal in all layouts: 4 of 4" in said
    assert json.loads((tmp_path / "out" / "demo.json").read_text())["median_seconds"]["adaptive"] == 8.0
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_no_place_for_the_results_is_told_before_the_rounds(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(cases.MAKERS, cases.TINY, lambda: pytest.fail("it begins"))
    (tmp_path / "file").touch()
    assert cli.main(["--quick", "--out", str(tmp_path / "file" / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out {tmp_path}/file/out: Not a directory") and error.count("\n") == 1


def test_no_model_is_one_line(monkeypatch, capsys, tmp_path):
    def fail():
        raise FileNotFoundError("no weights")

    monkeypatch.setitem(cases.MAKERS, cases.TINY, fail)
    assert cli.main(["--quick", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: the model cannot be made: no weights\n"


def test_an_aborted_switch_and_many_different_texts_are_errors():
    found = result((10.0, 12.0, 8.0))
    cli.verify(found)
    found.rounds[0][1] = run(f"static {HIGH}", 12.0, texts="abXY")
    with pytest.raises(DemoError, match="2 of 4 responses are not the same in all layouts"):
        cli.verify(found)
    found.rounds[0][-1] = run("adaptive", 8.0, switches=[SwitchMark(1, 2, 3.0, 0.5, 2, 77, error="no memory")])
    with pytest.raises(DemoError, match="a switch was aborted: no memory"):
        cli.verify(found)
