"""The demonstration without its servers: work, records, verdict, timeline, picture, tables, report, command line."""

import io
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import psutil
import pytest
from aiohttp import web
from PIL import Image
from rich.console import Console

from sglang_pat.demo import cases, cli, contest, picture, report, tables, timeline, verdict
from sglang_pat.demo.display import Display, Progress, line
from sglang_pat.demo.records import (
    Answer,
    DemoError,
    Result,
    Run,
    Sample,
    SeenSwitch,
    StepTime,
    name_of,
    switches_of,
)
from sglang_pat.predict.profile import save
from sglang_pat.testing.server import ServerDied
from sglang_pat.tools.cpu_share import Meter
from sglang_pat.tools.prompts import PROMPTS
from tests.unit.profiles_for_tests import profile

pytestmark = pytest.mark.unit

LOW, HIGH = "tp1×dp2", "tp2×dp1"
WORK = cases.Work(4, 8, 1.0, 64)


def switch(**changes):
    fields = dict(before=LOW, after=HIGH, at=3.0, pause=0.5, requests=2, tokens=77, moved_bytes=1_500_000, error="")
    return SeenSwitch(**fields | changes)


BACK = switch(before=HIGH, after=LOW, at=8.0, pause=0.001, requests=0, tokens=0, moved_bytes=0)
SAMPLES = [
    Sample(at=0.5, layout=LOW, loads=[2, 2]), Sample(at=2.5, layout=LOW, loads=[2, 0]),
    Sample(at=4.0, layout=HIGH, loads=[2]), Sample(at=6.0, layout=HIGH, loads=[1]),
]  # fmt: skip


def run(contender="adaptive", last=8.0, texts="abcd", **changes):
    """Four responses, the last one at ``last``; merged at 3.5 s if adaptive."""
    answers = [Answer(end=last * (i + 1) / 4, tokens=10, text=text) for i, text in enumerate(texts)]
    adaptive = contender == "adaptive"
    fields = dict(
        contender=contender, layout=contender.removeprefix("static ") if not adaptive else LOW, answers=answers,
        switches=[switch(), BACK] if adaptive else [], samples=SAMPLES if adaptive else [], others=0.25,
    )  # fmt: skip
    return Run(**fields | changes)


STEPS = [StepTime(requests=1, seconds={LOW: 0.06, HIGH: 0.04}), StepTime(requests=64, seconds={LOW: 0.2, HIGH: 0.3})]


def result(*rounds, **changes):
    """Of rounds of seconds: static tp1×dp2, static tp2×dp1, adaptive."""
    made = [
        [run(f"static {LOW}", low), run(f"static {HIGH}", high), run("adaptive", adaptive)]
        for low, high, adaptive in rounds or [(10.0, 12.0, 8.0)]
    ]
    fields = dict(
        name="real-link", model="SmolLM2", link="none", link_name="real link", work=asdict(WORK), steps=STEPS,
        rounds=made,
    )  # fmt: skip
    return Result(**fields | changes)


def report_of(*results):
    return report.Report(results=list(results), machine={"cores": 2, "cpu": "a CPU"}, seconds=1.5)


# -- the work -------------------------------------------------------------------------------------


def test_lengths_are_the_same_each_time_and_long_tailed():
    work = cases.Work(128, 32, 1.0, 448)
    lengths = work.lengths()
    assert lengths == work.lengths() == sorted(lengths) and len(lengths) == 128
    assert max(lengths) <= 448 and min(lengths) >= 4
    assert 28 <= lengths[64] <= 36 and max(lengths) > 8 * lengths[64]


def test_a_share_runs_into_the_limit():
    lengths = cases.Work(50, 16, 0.3, 200, capped=0.06).lengths()
    assert len(lengths) == 50 and lengths[-3:] == [200] * 3 and lengths[-4] < 60


def test_rounds_are_the_same_work_and_no_prompt_comes_twice():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 16
    rounds = [WORK.bodies(number) for number in range(3)]
    assert len({body["text"] for bodies in rounds for body in bodies}) == 12
    for bodies in rounds:
        params = [body["sampling_params"] for body in bodies]
        assert sorted(p["max_new_tokens"] for p in params) == WORK.lengths()
        assert all(p["temperature"] == 0 and p["ignore_eos"] for p in params)
        assert {p["custom_params"]["pat_limit"] for p in params} == {64}, "policies are not told the lengths"
    assert rounds[1] == WORK.bodies(1)


def test_a_round_that_does_not_count_tells_no_length():
    params = [body["sampling_params"] for body in WORK.bodies(0, tokens=4)]
    assert {(p["max_new_tokens"], p["custom_params"]["pat_limit"]) for p in params} == {(4, 4)}


def test_an_emulated_link_is_called_so():
    assert cases.CASES["real-link"].link_name == "real link"
    assert cases.CASES["slow-link"].link_name == "emulated link 5:0.03"


# -- records --------------------------------------------------------------------------------------


def test_gains_are_of_neighbours():
    one = result((10.0, 12.0, 8.0), (30.0, 36.0, 20.0), (10.0, 12.0, 20.0))
    assert one.best_static == f"static {LOW}" and one.worst_static == f"static {HIGH}"
    assert one.gains(one.adaptive) == [1.25, 1.5, 0.5] and one.gain == 1.25
    assert one.median(one.adaptive) == 20.0
    assert one.typical == one.rounds[0] and one.switched


def test_of_two_rounds_the_smaller_gain_is_drawn():
    one = result((10.0, 12.0, 8.0), (10.0, 12.0, 10.0))
    assert one.typical == one.rounds[1]


def test_differences_are_counted_by_response():
    one = result()
    one.rounds[0][1] = run(f"static {HIGH}", texts="abXY")
    assert (one.different(), one.responses()) == (2, 4)


def test_switches_of_a_status():
    record = {
        "started": 103.0, "phases": {"prepare": 0.5, "kv": 0.1}, "from_tp": 1, "to_tp": 2, "pause_seconds": 0.25,
        "requests": 3, "tokens": 70, "moved_bytes": 9, "error": "",
    }  # fmt: skip
    status = {"base": {"tp": 1, "dp": 2}, "switches": [record | {"started": 1.0}, record]}
    (found,) = switches_of(status, 100.0, 1)
    assert (found.before, found.after, found.at, found.pause, found.requests) == (LOW, HIGH, 3.5, 0.25, 3)
    assert switches_of(status, 100.0, 0) == []
    assert name_of({"tp": 2, "dp": 1}) == HIGH


def test_meter_tells_own_work_from_that_of_others():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(child.pid)
        mine, theirs = Meter([psutil.Process(), process]), Meter([psutil.Process()])
        before = process.cpu_times().user
        while process.cpu_times().user - before < 0.5:
            time.sleep(0.05)
        assert theirs.share() > mine.share()
    finally:
        child.kill()
        child.wait()


# -- the verdict ------------------------------------------------------------------------------------


def test_headline_says_where_it_is_ahead_and_where_not():
    ahead = result()
    behind = result((10.0, 12.0, 12.5), model="wide", link_name="emulated link 5:1")
    even = result((10.0, 12.0, 10.0))
    assert verdict.headline([ahead]) == "Adaptive is ahead of the better static layout: SmolLM2, real link (×1.25)"
    both = verdict.headline([ahead, behind])
    assert "ahead of the better static layout: SmolLM2, real link (×1.25); behind" in both
    assert "behind the better static layout: wide, emulated link 5:1 (×0.80)" in both
    assert verdict.headline([even]).startswith("Adaptive is level with")


def test_choice_of_the_static_layout():
    low, high = result((10.0, 12.0, 8.0)), result((15.0, 10.0, 8.0))
    assert verdict.choice([low, high]).startswith(
        "No static layout is best in all cases: the wrong one takes up to 50%"
    )
    assert (
        verdict.choice([low]) == f"static {LOW} is the better static layout here; the other one takes up to 20% longer."
    )


def test_reasons_name_measured_steps():
    flat = [StepTime(requests=n, seconds={LOW: 0.06, HIGH: 0.04}) for n in (1, 64)]
    high = result((12.0, 10.0, 10.0), steps=flat)
    assert f"{HIGH} is the faster layout for any number" in verdict.reason(high)
    assert "60 / 40 ms with 1, 60 / 40 ms with 64 requests" in verdict.reason(high)
    assert f"takes {HIGH} for the faster layout, but static {LOW} was" in verdict.reason(result(steps=flat))
    still = result()
    still.rounds[0][-1] = run("adaptive", switches=[])
    assert "expected no gain" in verdict.reason(still)
    crossing = verdict.reason(result((8.0, 9.0, 10.0)))
    assert f"the faster layout is {LOW} with 64 left and {HIGH} with 1" in crossing


@pytest.mark.parametrize(("adaptive", "said"), [(9.7, "ahead"), (10.0, "even"), (10.1, "even"), (11.0, "behind")])
def test_standing(adaptive, said):
    assert verdict.standing(result((10.0, 12.0, adaptive))) == said


def test_an_engine_that_stayed_in_the_better_layout_is_level_with_it():
    still = result((10.0, 12.0, 5.0))
    still.rounds[0][-1] = run("adaptive", 5.0, switches=[])
    assert verdict.standing(still) == "even"
    at_once = result((12.0, 10.0, 9.0))
    at_once.rounds[0][-1] = run("adaptive", 9.0, switches=[switch(at=0.1, pause=0.01, requests=0)])
    assert verdict.standing(at_once) == "even"
    astray = result((10.0, 12.0, 12.0))
    astray.rounds[0][-1] = run("adaptive", 12.0, switches=[switch(at=0.1, pause=0.01, requests=0)])
    assert verdict.standing(astray) == "behind"
    wrong = result((12.0, 10.0, 12.0))  # it should have switched
    wrong.rounds[0][-1] = run("adaptive", 12.0, switches=[])
    assert verdict.standing(wrong) == "behind"


# -- timeline and picture ---------------------------------------------------------------------------


def test_bands_change_at_the_end_of_a_pause():
    found = timeline.bands(run())
    assert [(band.start, band.end, band.layout) for band in found] == [(0.0, 3.5, LOW), (3.5, 8.0, HIGH)]
    aborted = timeline.bands(run(switches=[switch(error="no")]))
    assert [(band.end, band.layout) for band in aborted] == [(8.0, LOW)]


def test_a_replica_is_idle_from_the_first_sample_without_requests():
    found = timeline.lanes(run())
    assert [(lane.start, lane.end, lane.ranks, lane.busy) for lane in found] == [
        (0.0, 3.5, (0,), True), (0.0, 2.5, (1,), True), (2.5, 3.5, (1,), False), (3.5, 8.0, (0, 1), True),
    ]  # fmt: skip


def test_requests_left_as_steps():
    times, counts = timeline.left(run(), 0.0, 8.0)
    assert (times, counts) == ([0.0, 2.0, 4.0, 6.0, 8.0], [4, 3, 2, 1, 1])
    assert timeline.left(run(), 3.5, 5.0) == ([3.5, 4.0, 5.0], [3, 2, 2])


def texts(figure):
    return "\n".join(text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text")))


def test_picture_has_its_message_as_title(tmp_path):
    figure = picture.draw(report_of(result(), result((10.0, 12.0, 12.5), model="wide", link_name="emulated link 5:1")))
    said = texts(figure).replace("\n", " ")
    assert "Adaptive is ahead of the better static layout: SmolLM2, real link (×1.25); behind" in said
    assert "wide, emulated link 5:1: 4 requests" in said
    assert f"to {HIGH} with 2 left" in said and "paused 500 ms" in said
    assert "rank without work" in said
    path = picture.save(figure, tmp_path / "new" / "demo.png")
    assert Image.open(path).size[0] > 1000


def test_picture_of_an_aborted_switch():
    broken = result()
    broken.rounds[0][-1] = run("adaptive", switches=[switch(error="no")])
    assert f"switch to {HIGH} aborted" in texts(picture.draw(report_of(broken)))


# -- tables, report, display ------------------------------------------------------------------------


def printed(thing):
    console = Console(file=io.StringIO(), width=140)
    console.print(thing)
    return console.file.getvalue()


def test_table_has_medians_rounds_and_gains():
    text = printed(tables.table(result((10.0, 12.0, 8.0), (10.0, 12.0, 10.0))))
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "9.0" in rows["adaptive"] and "8.0 10.0" in rows["adaptive"] and "×1.12" in rows["adaptive"]
    assert "×0.83" in rows[f"static {HIGH}"] and "25% of the cores" in rows["adaptive"]


def test_report_comes_back_and_has_the_figures(tmp_path):
    made = report_of(result())
    report.write(made, tmp_path / "new" / "demo.json")
    assert report.read(tmp_path / "new" / "demo.json") == made
    figures = json.loads((tmp_path / "new" / "demo.json").read_text())["results"][0]["figures"]
    assert figures["gain_over_best_static"] == 1.25 and figures["best_static"] == f"static {LOW}"
    assert "texts equal in all layouts: 4 of 4" in made.summary()


def test_display_of_a_run_under_way():
    progress = Progress("round 1, adaptive", 4, began=100.0)
    assert "4 of 4 left, ?" in line(progress, 101.0)
    progress.done, progress.layout = 3, LOW
    assert line(progress, 105.0).endswith(f"1 of 4 left, {LOW},   5.0 s")
    plain = Display(Console(file=io.StringIO(), width=120))
    with plain.following(progress):
        pass


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
