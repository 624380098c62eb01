"""What the demonstration shows: timeline, picture, tables, report, display."""

import io
import json

import pytest
from PIL import Image
from rich.console import Console

from sglang_pat.demo import picture, report, tables, timeline
from sglang_pat.demo.display import Display, Progress, line
from tests.unit.demo_world import HIGH, LOW, report_of, result, run, switch

pytestmark = pytest.mark.unit


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
