"""The demonstration without its servers: work, client, records, tables, picture, report, command line."""

import asyncio
import io
import json
import subprocess
import sys
import time
from contextlib import contextmanager

import aiohttp
import psutil
import pytest
from aiohttp import web
from PIL import Image
from rich.console import Console

from sglang_pat.demo import cli, client, picture, report, runs, tables, timeline
from sglang_pat.demo.client import run_tasks
from sglang_pat.demo.display import Display, frame, line
from sglang_pat.demo.progress import Progress, Row
from sglang_pat.demo.records import Answer, DemoError, Run, SeenSwitch, difference, switches_of
from sglang_pat.demo.routes import Routes, loads
from sglang_pat.demo.tasks import fixed_tasks, natural_tasks
from sglang_pat.testing import models
from sglang_pat.testing.server import ServerDied
from sglang_pat.tools.cpu_share import Meter
from sglang_pat.tools.prompts import PROMPTS

pytestmark = pytest.mark.unit


def answer(index, last, group=0, first=1.0, text="text"):
    """One token at ``first``, ten at ``last``."""
    return Answer(
        index=index, prompt=f"prompt {index}", group=group, sent=0.5, times=[first, last], counts=[1, 10],
        text=text, finish="stop",
    )  # fmt: skip


def switch(**changes):
    fields = dict(
        before="tp1×dp2", after="tp2×dp1", at=3.0, pause=0.5, phases={"prepare": 0.001, "drain": 0.02, "kv": 0.3},
        felt=0.7, reason="threshold", requests=2, migrated=2, recomputed=0, tokens=77, moved_bytes=1_500_000,
        error="",
    )  # fmt: skip
    return SeenSwitch(**fields | changes)


BACK = switch(before="tp2×dp1", after="tp1×dp2", at=8.0, pause=0.001, requests=0, tokens=0, moved_bytes=0, felt=0.0)


def run(**changes):
    """Answers end at 2, 4, 6 and 8 s, alternately on group 0 and 1; merged at 3.5 s."""
    fields = dict(
        name="adaptive", base="tp1×dp2", adaptive=True, start_seconds=9.0, others=0.25, switches=[switch(), BACK],
        answers=[answer(i, last, group=i % 2) for i, last in enumerate((2.0, 4.0, 6.0, 8.0))],
    )  # fmt: skip
    return Run(**fields | changes)


def report_of(runs_, **changes):
    fields = dict(model="m", options={"switch_at": 2}, different={}, machine={"cores": 2}, seconds=1.5)
    return report.Report(runs=runs_, **fields | changes)


def static(name="static tp1×dp2", base="tp1×dp2", **changes):
    return run(name=name, base=base, adaptive=False, switches=[], **changes)


# -- the work -------------------------------------------------------------------------------------


def test_prompts_differ_and_bodies_are_greedy_streams():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 16
    tasks = natural_tasks(16, 240)
    assert [task.prompt for task in tasks] == list(PROMPTS[:16])
    body = tasks[0].body()
    assert (body["temperature"], body["stream"], body["max_tokens"], body["ignore_eos"]) == (
        0,
        True,
        240,
        False,
    )


def test_fixed_lengths_are_the_same_each_time_and_long_tailed():
    lengths = [task.max_tokens for task in fixed_tasks(16, 800)]
    assert lengths == [task.max_tokens for task in fixed_tasks(16, 800)]
    assert max(lengths) == 800 and min(lengths) >= 100
    assert sorted(lengths)[8] < 500
    assert all(task.body()["ignore_eos"] for task in fixed_tasks(4, 100))


# -- records --------------------------------------------------------------------------------------


def test_figures_of_a_run():
    one = run()
    assert (one.tokens, one.wall, one.tokens_per_second) == (40, 8.0, 5.0)
    assert [one.tail_start(left) for left in (1, 2, 3, 4, 9)] == [6.0, 4.0, 2.0, 0.0, 0.0]


def test_token_time_counts_what_lies_within():
    steady = Answer(
        index=0, prompt="", group=0, sent=0.0, times=[1.0, 2.0, 4.0], counts=[1, 3, 7], text="", finish="stop"
    )
    one = run(answers=[steady], switches=[])
    assert one.token_time(0.0, 4.0) == pytest.approx(3.0 / 6)
    assert one.token_time(1.5, 4.0) == pytest.approx(2.0 / 4)
    assert one.token_time(2.5, 4.0) is None
    paused = run(answers=[steady], switches=[switch(at=1.2, pause=0.3)])
    assert paused.tail_token_time(1) == paused.token_time(1.5, 4.0)


def test_longest_gap_is_of_waits_that_touch_the_span():
    one = answer(0, 4.0, first=1.0)
    assert one.longest_gap(2.0, 2.1) == 3.0
    assert one.longest_gap(4.5, 5.0) == 0.0


def test_differences_name_prompt_and_first_character():
    same = run()
    other = run(answers=[*same.answers[:2], answer(2, 6.0, text="tent"), answer(3, 8.0, text="text and more")])
    assert difference([same, same]) == {}
    assert difference([same, other, same]) == {2: 2, 3: 4}


def test_switches_of_a_status():
    record = dict(
        epoch=2, from_tp=1, to_tp=2, reason="threshold", started=102.5, pause_seconds=0.25, requests=1, migrated=1,
        phases={"prepare": 0.5, "kv": 0.1}, recomputed=0, tokens=5, moved_bytes=6, error="",
    )  # fmt: skip
    earlier = record | {"started": 99.0}
    empty = record | {"started": 109.0, "from_tp": 2, "to_tp": 1, "requests": 0}
    status = {"base": {"tp": 1, "dp": 2}, "switches": [earlier, record, empty]}
    first, second = switches_of(status, 100.0, [answer(0, 4.0)])
    assert (first.before, first.after, first.at, first.pause) == ("tp1×dp2", "tp2×dp1", 3.0, 0.25)
    assert (first.felt, second.felt) == (3.0, 0.0)
    assert second.after == "tp1×dp2"


def test_meter_tells_own_work_from_that_of_others():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        burning = psutil.Process(process.pid)
        own, foreign = Meter([burning, psutil.Process()]), Meter([psutil.Process()])
        begun = burning.cpu_times().user
        while burning.cpu_times().user < begun + 0.5:  # on a busy machine it waits for its turn
            time.sleep(0.05)
        counted, not_counted = own.share(), foreign.share()
        process.kill()
    assert 0 <= counted < not_counted <= 1


# -- timeline and picture -----------------------------------------------------------------------------


def test_bands_change_at_the_end_of_a_pause():
    assert timeline.bands(run(), 10.0) == [
        timeline.Band(0.0, 3.5, "tp1×dp2"),
        timeline.Band(3.5, 8.001, "tp2×dp1"),
        timeline.Band(8.001, 10.0, "tp1×dp2"),
    ]
    assert timeline.bands(run(), 8.0) == [
        timeline.Band(0.0, 3.5, "tp1×dp2"),
        timeline.Band(3.5, 8.0, "tp2×dp1"),
    ]
    aborted = run(switches=[switch(error="rank 1: no")])
    assert timeline.bands(aborted, 8.0) == [timeline.Band(0.0, 8.0, "tp1×dp2")]


def test_lanes_show_idle_ranks():
    found = timeline.lanes(static(), 8.0)
    assert found == [
        timeline.Lane(0.0, 6.0, "tp1×dp2", 0, (0,), True),
        timeline.Lane(6.0, 8.0, "tp1×dp2", 0, (0,), False),
        timeline.Lane(0.0, 8.0, "tp1×dp2", 1, (1,), True),
    ]
    merged = timeline.lanes(run(), 8.0)[-1]
    assert (merged.ranks, merged.busy, merged.start) == ((0, 1), True, 3.5)
    unknown = static(answers=[answer(0, 2.0), answer(1, 5.0, group=None)])
    assert all(lane.end == 5.0 and lane.busy for lane in timeline.lanes(unknown, 5.0))


def test_bars_are_cut_where_the_layout_changes():
    found = timeline.bars(run())
    longest = [bar for bar in found if bar.row == 0]
    assert longest == [
        timeline.Bar(0, 0.5, 1.0, "wait", 1),
        timeline.Bar(0, 1.0, 3.5, "tp1×dp2", 1),
        timeline.Bar(0, 3.5, 8.0, "tp2×dp1", 0),
    ]
    assert [bar.what for bar in found if bar.row == 3] == ["wait", "tp1×dp2"]


def test_running_requests_as_steps():
    times, counts = timeline.running(run())
    assert list(zip(times, counts, strict=True)) == [
        (0.0, 0),
        (0.5, 4),
        (2.0, 3),
        (4.0, 2),
        (6.0, 1),
        (8.0, 0),
    ]


def test_picture_labels_runs_and_pauses(tmp_path):
    all_runs = [run(), static(), static("static tp2×dp1", "tp2×dp1")]
    figure = picture.draw(report_of(all_runs))
    texts = [text.get_text() for text in figure.texts]
    texts += [text.get_text() for axes in figure.axes for text in axes.texts]
    texts += [axes.get_title(loc=side) for axes in figure.axes for side in ("left", "right")]
    everything = "\n".join(texts)
    assert "500 ms pause\n2 requests, 77 KV tokens\n1.5 MB moved" in everything
    for words in (
        "adaptive: starts as tp1×dp2",
        "static tp2×dp1",
        "8.0 s",
        "idle",
        "switches with 2 left",
        "4 of 4",
        "took 25% of",
    ):
        assert words in everything
    path = picture.save(figure, tmp_path / "new" / "timeline.png")
    assert Image.open(path).size[0] == 1600


@pytest.mark.parametrize("count", [2, 32])
def test_picture_of_few_and_many_requests_and_of_an_aborted_switch(tmp_path, count):
    answers = [answer(i, 2.0 + i, group=None) for i in range(count)]
    picture.save(picture.draw(report_of([run(answers=answers, switches=[switch(error="no")])])), tmp_path / "x.png")


# -- tables and report ----------------------------------------------------------------------------------


def rendered(table):
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    lines = console.file.getvalue().splitlines()
    rows = (line.strip("│┃ ").replace("┃", "│").split("│") for line in lines if "│" in line or "┃" in line)
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_runs_table():
    rows = rendered(tables.runs_table([run(), static()], 2))
    assert rows["wall time, s"] == ["8.0", "8.0"]
    assert rows["tokens/s"] == ["5.0", "5.0"]
    assert rows["tail (last 2 requests), s"] == ["4.0", "4.0"]
    assert rows["switches"] == ["2", "0"]
    assert rows["other programs, % of the cores"] == ["25", "25"]


def test_switches_table_has_every_phase():
    odd = switch(phases={"prepare": 0.0005, "kv": 0.0123, "new phase": 0.25}, error="rank 0: injected")
    rows = rendered(tables.switches_table(run(switches=[switch(), odd])))
    assert rows["prepare (no pause), ms"] == ["1.0", "0.5"]
    assert rows["drain, ms"] == ["20.0", "-"]
    assert rows["new phase, ms"] == ["-", "250"]
    assert rows["pause, ms"] == ["500", "500"]
    assert rows["sent between ranks"] == ["1.5 MB", "1.5 MB"]
    assert rows["aborted"] == ["", "rank 0: injected"]


def test_report_comes_back_and_has_the_figures(tmp_path):
    made = report_of([run(), static()], different={3: 4}, machine=report.machine())
    path = tmp_path / "new" / "demo.json"
    report.write(made, path)
    assert report.read(path) == made
    figures = json.loads(path.read_text())["runs"][0]["figures"]
    assert (figures["tokens"], figures["wall_seconds"], figures["tail_seconds"]) == (40, 8.0, 4.0)
    assert made.machine["cores"] >= 1 and made.machine["sglang"]
    assert made.summary().endswith("texts equal in all runs: 3 of 4")


def test_an_emulated_link_is_named(monkeypatch):
    monkeypatch.setenv("SGLANG_PAT_LINK", "100:1")
    assert "emulated link (µs:GB/s) 100:1" in report_of([run()], machine=report.machine()).summary()


# -- display --------------------------------------------------------------------------------------------


def status_of(tp=1, loads=(0, 0), target=None, switches=()):
    groups = [{"in_flight": 0, "waiting": 0, "running": load} for load in loads]
    layout, base = {"tp": tp, "dp": 2 // tp}, {"tp": 1, "dp": 2}
    return dict(
        layout=layout, base=base, target=target, groups=groups, switches=list(switches), switching=bool(target),
        requests=sum(loads),
    )  # fmt: skip


def test_display_of_a_run_under_way():
    progress = Progress("adaptive", ["short", "a [bold]prompt[/bold]"])
    now = progress.began
    progress.rate(now)
    progress.rows[0].sent = progress.rows[1].sent = 0.0
    progress.rows[0].heard(0.5, 6)
    record = dict(from_tp=1, to_tp=2, started=now + 1, pause_seconds=0.02, requests=1, tokens=9)
    progress.engine = status_of(switches=[record | {"started": now - 5}, record], target={"tp": 2, "dp": 1})
    assert "0 of 2 done,  1 running,     6 tokens,    3.0 tokens/s, tp1×dp2 → tp2×dp1, 1 switches" in line(
        progress, now + 2
    )
    console = Console(width=100, file=io.StringIO())
    console.print(frame(progress, now + 2))
    text = console.file.getvalue()
    assert "a [bold]prompt[/bold]" in text and "pause 20 ms" in text


# -- routes ---------------------------------------------------------------------------------------------


def routed(*events):
    """Groups of three requests; events: a request's number (sent) or a reading of the loads."""
    rows = [Row(str(i)) for i in range(3)]
    routes = Routes([0, 0])
    for event in events:
        routes.sent(rows[event]) if isinstance(event, int) else routes.seen(event)
    return [row.group for row in rows]


def test_routes_one_by_one():
    assert routed(0, [0, 0], [1, 0], 1, [1, 0], [1, 1], 2, [1, 2]) == [0, 1, 1]


def test_routes_two_between_readings():
    assert routed(0, 1, [0, 1], [0, 2], 2, [1, 2]) == [
        1,
        1,
        0,
    ]  # a reading that has only one of them says nothing
    assert routed(0, 1, [1, 1], 2, [1, 2]) == [None, None, 1]


def test_routes_are_left_open_when_a_request_ends_or_the_layout_changes():
    assert routed(0, [1, 0], 1, [0, 1], 2, [0, 2]) == [0, None, None]
    assert routed(0, [1, 0], 1, [2], 2, [3]) == [0, None, 0]


def test_loads_of_a_status():
    status = status_of(loads=(2, 3))
    status["groups"][0]["in_flight"] = 1
    assert loads(status) == [3, 3]


# -- client, against a server that only pretends ------------------------------------------------------------


class FakeServer:
    """Answers chat requests with two pieces of text and gives them to groups in turn."""

    def __init__(self, finish="stop", route=True):
        self.finish, self.route, self.loads, self.bodies = finish, route, [0, 0], []

    @contextmanager
    def session(self):
        raise NotImplementedError

    async def status(self, _):
        return web.json_response(status_of(loads=self.loads))

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.route:
            self.loads[len(self.bodies) % 2] += 1
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(choices, tokens=None):
            usage = None if tokens is None else {"completion_tokens": tokens}
            await response.write(b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n")

        await send([{"delta": {"role": "assistant", "content": ""}}])
        await send([{"delta": {"content": "Hello"}}], 1)
        await send([{"delta": {"content": " you"}}], 3)
        await send([{"delta": {}, "finish_reason": self.finish}])
        await send([], 4)
        await response.write(b"data: [DONE]\n\n")
        return response


async def against(fake, count):
    app = web.Application()
    app.add_routes([web.get("/pat/status", fake.status), web.post("/v1/chat/completions", fake.chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    fake.session = aiohttp.ClientSession
    try:
        display = Display(Console(file=io.StringIO()))
        return await run_tasks(fake, natural_tasks(count, 9), display, "fake")
    finally:
        await runner.cleanup()


def test_client_notes_text_tokens_and_groups(monkeypatch):
    monkeypatch.setattr(client, "ROUTE_SECONDS", 60)
    fake = FakeServer()
    _, answers = asyncio.run(against(fake, 3))
    assert [a.prompt for a in answers] == list(PROMPTS[:3])
    assert [a.group for a in answers] == [1, 0, 1]
    assert [(a.text, a.counts, a.finish) for a in answers] == [("Hello you", [1, 3, 4], "stop")] * 3
    assert all(0 <= a.sent <= a.first <= a.last for a in answers)


def test_client_leaves_the_group_open_if_it_was_not_seen():
    _, answers = asyncio.run(against(FakeServer(route=False), 1))
    assert answers[0].group is None


def test_client_refuses_an_aborted_answer():
    with pytest.raises(DemoError, match="did not end properly: finish reason 'abort'"):
        asyncio.run(against(FakeServer(finish="abort"), 1))


# -- servers and command line -----------------------------------------------------------------------------------


def test_setups_differ_in_layout_and_policy_only():
    adaptive, low, high = runs.setups(5)
    assert adaptive.flags == "--tp 1 --dp 2 --adaptive-tp --pat-policy threshold --pat-switch-at 5".split()
    assert low.flags == "--tp 1 --dp 2 --adaptive-tp --pat-policy off".split()
    assert high.flags == "--tp 2 --dp 1 --adaptive-tp --pat-policy off".split()


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--prompts", "1"], "--prompts 1: must be from 2 to 32"),
        (["--switch-at", "16"], "--switch-at 16: must be from 1 to 15"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 8"),
        (["--model", "/nowhere"], "--model /nowhere: no config.json there"),
    ],
)
def test_bad_command_lines(capsys, argv, words):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_no_model_is_one_line(monkeypatch, capsys):
    def fail(_):
        raise FileNotFoundError("no weights")

    monkeypatch.setattr(models, "make_smollm2", fail)
    assert cli.main([]) == 1
    assert capsys.readouterr().err == "error: the model cannot be made: no weights\n"


def test_a_server_that_dies_is_told_with_its_log_and_stopped(monkeypatch, capsys, tmp_path):
    stopped = []

    class DeadServer:
        def __init__(self, *_, **__):
            pass

        def wait_ready(self):
            raise ServerDied("server died (exit code 3); end of its log:\nlast words")

        def stop(self):
            stopped.append(self)

    monkeypatch.setattr(runs, "Server", DeadServer)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--quick"]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[0].startswith("error: adaptive: server died (exit code 3)")
    assert "last words" in error and len(stopped) == 1


def test_whole_command_with_runs_given(monkeypatch, capsys, tmp_path):
    given = iter([run(), static(), static("static tp2×dp1", "tp2×dp1")])
    monkeypatch.setattr(runs, "run_setup", lambda *_: next(given))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--quick", "--prompts", "4", "--switch-at", "2", "--json", "figures.json"]) == 0
    out = capsys.readouterr().out
    assert "texts equal in all runs: 4 of 4" in out
    assert (tmp_path / "out" / "timeline.png").is_file() and (tmp_path / "figures.json").is_file()


def test_an_aborted_switch_is_an_error():
    with pytest.raises(DemoError, match="adaptive: a switch was aborted: rank 1: no"):
        cli.verify([run(switches=[switch(error="rank 1: no")])], {})


def test_a_run_that_never_switched_is_an_error():
    with pytest.raises(DemoError, match="adaptive: it never switched with requests alive"):
        cli.verify([run(switches=[BACK])], {})


def test_different_texts_are_an_error():
    words = "1 answers are not the same in all runs; the first, to 'prompt 2', differs from character 7 on"
    with pytest.raises(DemoError, match=words):
        cli.verify([run(), static()], {2: 7})


def test_help_needs_no_engine():
    code = "import sys; from sglang_pat.demo import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'sglang', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
