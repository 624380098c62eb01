"""The demonstration's contenders, on a server that is none, and its command line."""

import io
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from aiohttp import web
from rich.console import Console

from sglang_pat.demo import cases, cli, contest
from sglang_pat.demo.display import Display
from sglang_pat.demo.records import (
    DemoError,
)
from sglang_pat.predict.profile import save
from sglang_pat.testing.server import ServerDied
from tests.unit.demo_world import HIGH, LOW, STEPS, WORK, result, run, switch
from tests.unit.profiles_for_tests import profile

pytestmark = pytest.mark.unit


# -- contest ----------------------------------------------------------------------------------------


class FakeServer:
    """Answers ``/generate`` and ``/pat/status``; the second response is one token short if ``short``."""

    def __init__(self, short=False):
        self.short, self.asked, self.reconfigured = short, 0, []
        self.process = SimpleNamespace(pid=psutil.Process().pid)
        self.url = ""

    def children(self):
        return []

    def reconfigure(self, tp):
        self.reconfigured.append(tp)

    def status(self):
        made = [dict(
            started=time.time(), phases={}, from_tp=1, to_tp=2, pause_seconds=0.1, requests=2, tokens=5, moved_bytes=1,
            error="",
        )] * bool(self.asked)  # fmt: skip
        layout = {"tp": 1, "dp": 2}
        groups = [{"in_flight": 0, "waiting": 1, "running": 1}] * 2
        return dict(num_switches=len(made), layout=layout, base=layout, requests=0, switches=made, groups=groups)

    async def _generate(self, request):
        body = await request.json()
        self.asked += 1
        tokens = body["sampling_params"]["max_new_tokens"] - (self.short and self.asked == 2)
        return web.json_response({"text": body["text"][-3:], "meta_info": {"completion_tokens": tokens}})

    @contextmanager
    def serving(self, monkeypatch):
        """Runs the event loop's side of the server inside the contender's own loop."""
        import aiohttp

        server, real = self, contest._send

        async def send(_, bodies, progress):
            app = web.Application()
            app.router.add_post("/generate", server._generate)

            async def status(_request):
                return web.json_response(server.status())

            app.router.add_get("/pat/status", status)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            try:
                return await real(server, bodies, progress)
            finally:
                await runner.cleanup()

        monkeypatch.setattr(contest, "_send", send)
        self.session = aiohttp.ClientSession
        yield

    async def one(self, session, body):
        async with session.post(self.url + "/generate", json=body) as response:
            return await response.json()


def quiet():
    return Display(Console(file=io.StringIO()))


def test_a_contender_runs_a_batch(monkeypatch):
    server = FakeServer()
    with server.serving(monkeypatch):
        found = contest.Contender("adaptive", server, None).run(WORK.bodies(0), quiet(), "round 1")
    assert found.tokens == sum(WORK.lengths()) and found.layout == LOW and server.reconfigured == []
    assert [(s.after, s.requests) for s in found.switches] == [(HIGH, 2)]
    assert found.samples and found.samples[0].loads == [2, 2]


def test_a_static_contender_is_put_into_its_layout(monkeypatch):
    server = FakeServer()
    with server.serving(monkeypatch):
        contest.Contender(f"static {HIGH}", server, contest.HIGH).run(WORK.bodies(0), quiet(), "round 1")
    assert server.reconfigured == [2]


def test_a_short_response_is_an_error(monkeypatch):
    server = FakeServer(short=True)
    with server.serving(monkeypatch), pytest.raises(DemoError, match="shorter or longer"):
        contest.Contender("adaptive", server, None).run(WORK.bodies(0), quiet(), "round 1")


def test_step_times_are_the_profiles(tmp_path):
    path = tmp_path / "p.json"
    save(profile(), path)
    found = contest.step_times(path, (1, 4))
    assert [step.requests for step in found] == [1, 4]
    assert all(set(step.seconds) == {LOW, HIGH} and min(step.seconds.values()) > 0 for step in found)


def test_a_dead_server_is_blamed_with_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("out of memory")
    dead = SimpleNamespace(process=SimpleNamespace(wait=lambda _: 1, poll=lambda: 1), log=log, log_text=log.read_text)

    def fail():
        raise ConnectionError("refused")

    with pytest.raises(DemoError, match=r"(?s)the server died \(exit code 1\).*out of memory"):
        contest._blaming(dead, fail)
    with pytest.raises(DemoError, match="gone"):
        contest._blaming(dead, lambda: (_ for _ in ()).throw(ServerDied("gone")))


# -- command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "words"), [
    (["--minutes", "0"], "--minutes 0: must be above 0"),
    (["--quick", "--only", "slow-link"], "--quick has a case and a model of its own"),
    (["--only", "nothing"], "invalid choice"),
    (["--model", "/nowhere"], "no config.json there"),
])  # fmt: skip
def test_bad_command_lines(capsys, argv, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_rounds_end_with_the_time():
    more = cli.until(time.monotonic() + 100, 2, 4)
    assert more(1, 1e9) and more(2, 50.0) and not more(2, 200.0) and not more(4, 1.0)


def test_a_case_that_does_not_fit_is_left_out(monkeypatch, capsys, tmp_path):
    clock = [1000.0]
    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(cli, "may_fork", lambda: False)
    monkeypatch.setattr(cli, "conclude", lambda *_: None)
    asked = []

    def taking(seconds, rounds):
        def run_case(name, case, args, over, *rest):
            asked.append((name, over - clock[0]))
            clock[0] += seconds
            return result(*[(10.0, 12.0, 11.0)] * rounds)

        return run_case

    for seconds, rounds, cases_run in ((200, 2, 2), (300, 2, 1), (232, 3, 2)):
        asked.clear()
        monkeypatch.setattr(cli, "run_case", taking(seconds, rounds))
        assert cli.main(["--out", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert len(asked) == cases_run and asked[0] == ("real-link", 232.5)
        assert ("slow-link: left out, 8 minutes are not enough" in out) == (cases_run == 1)
    assert asked[1] == ("slow-link", 233), "all that is left"


def test_no_model_is_one_line(monkeypatch, capsys):
    def fail():
        raise FileNotFoundError("no weights of SmolLM2")

    monkeypatch.setitem(cases.MAKERS, cases.TINY, fail)
    assert cli.main(["--quick"]) == 1
    assert capsys.readouterr().err == "error: the model cannot be made: no weights of SmolLM2\n"


def test_whole_command_with_rounds_given(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(cases.MAKERS, cases.TINY, lambda: tmp_path)
    monkeypatch.setattr(contest, "profile", lambda *_: tmp_path)
    monkeypatch.setattr(contest, "step_times", lambda *_: STEPS)
    rounds = result((10.0, 12.0, 12.5)).rounds
    monkeypatch.setattr(contest, "play", lambda *_: rounds)
    assert cli.main(["--quick", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Adaptive is behind the better static layout: tiny, real link (×0.80)" in said
    assert "why not ahead with tiny, real link:" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"demo.png", "demo.json"}


def test_an_aborted_switch_is_an_error():
    broken = result()
    broken.rounds[0][-1] = run("adaptive", switches=[switch(error="rank 1: no memory")])
    with pytest.raises(DemoError, match="a switch was aborted: rank 1: no memory"):
        cli.verify([broken])


def test_many_different_texts_are_an_error():
    broken = result()
    cli.verify([broken])
    broken.rounds[0][1] = run(f"static {HIGH}", texts="abXY")
    with pytest.raises(DemoError, match="2 of 4 responses are not the same in all layouts"):
        cli.verify([broken])


def test_help_needs_no_engine():
    code = "import sys; from sglang_pat.demo import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'sglang', 'matplotlib'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)
