"""Programs on test cases: which block is run, what counts as right, and what a Sandbox Fusion service answers."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_sandbox import fusion, programs
from reward_sandbox.limits import TimeLimits
from reward_sandbox.programs import _list_blocks, find_program, get_keys, matches_output, matches_result, run_again
from reward_sandbox.runs import Run, SandboxError
from reward_sandbox.sandbox import make_sandbox

pytestmark = pytest.mark.unit
score_response = functools.partial(programs.score_response, maximum=30.0)


class Scripted:
    """A sandbox whose programs do what is said: one answer for each run."""

    def __init__(self, *runs: Run | str) -> None:
        self.runs, self.opened, self.asked = list(runs), 0, []

    @contextlib.contextmanager
    def open(self, program: str) -> Iterator[Scripted]:
        self.opened += 1
        self.program = program
        yield self

    def run(self, stdin: str, limit: float, maximum: float) -> Run:
        self.asked.append((stdin, limit, maximum))
        found = self.runs.pop(0)
        return Run(ended="exit", output=found, wall=1.0, waited=0.25) if isinstance(found, str) else found


TRUTH = {"inputs": ["1", "2", "3"], "outputs": ["1\n", "2\n", "3\n"]}
CODE = "```python\nprint(input())\n```"
CUT = Run(ended="cut", wall=2.0)


@pytest.mark.parametrize(
    "response, program",
    [
        ("no code", None),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\nthen\n```Python\nb\n```", "b\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("```cpp\nint a;\n```\nand\n```py\nb\n```\n", "b\n"),
        ("```cpp\nint a;\n```\nno more", None),
        ("<think>```python\na\n```</think>```python\nb", "b"),
    ],
)
def test_which_block_is_the_program(response, program):
    assert find_program(response) == program


@given(st.lists(st.sampled_from(["```", "py", "\n", " ", "x"]), max_size=40).map("".join))
def test_blocks_are_those_of_an_expression(response):
    """The expression is shorter, but takes a minute for "```python" written ten thousand times."""
    blocks = re.findall(r"```([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", response, re.DOTALL)
    assert list(_list_blocks(response)) == blocks


def test_all_or_nothing_ends_at_the_first_that_is_not_right():
    sandbox = Scripted("1", CUT, "3")
    score = score_response(CODE, TRUTH, sandbox, [9.0, 2.0, 30.0], maximum=20.0)
    assert (score.value, score.outcome) == (0.0, "cut")
    assert [(run.outcome, run.seconds, run.limit) for run in score.runs] == [("right", 0.75, 9.0), ("cut", 2.0, 2.0)]
    assert sandbox.asked == [("1", 9.0, 20.0), ("2", 2.0, 20.0)] and sandbox.program == "print(input())\n"


def test_a_share_of_the_cases():
    score = score_response(CODE, TRUTH, Scripted("1", CUT, "3"), [2.0] * 3, all_or_nothing=False)
    assert score.value == pytest.approx(2 / 3)
    assert score.outcome == "cut" and [run.outcome for run in score.runs] == ["right", "cut", "right"]


def test_a_share_is_that_of_the_first_ten():
    truth = {"inputs": ["1"] * 12, "outputs": ["1"] * 12}
    score = score_response(CODE, truth, Scripted("2", *["1"] * 9), [2.0] * 12, all_or_nothing=False)
    assert score.value == pytest.approx(0.9) and len(score.runs) == 10


@pytest.mark.parametrize("ended", ["error", "cut", "memory", "output"])
def test_a_run_that_ends_otherwise_is_its_outcome(ended):
    score = score_response(CODE, TRUTH, Scripted(Run(ended=ended, output="1", error="why")), [2.0] * 3)
    assert (score.value, score.outcome, score.error) == (0.0, ended, "why")


def test_no_code_starts_nothing():
    sandbox = Scripted()
    assert score_response("text", TRUTH, sandbox, [2.0] * 3).outcome == "no_code"
    assert not sandbox.opened


def test_a_sandbox_that_was_lost_is_opened_once_more():
    sandbox = Scripted("1", Run(ended="lost"), "2", "3")
    assert score_response(CODE, TRUTH, sandbox, [2.0] * 3).value == 1.0
    assert sandbox.opened == 2
    assert score_response(CODE, TRUTH, Scripted(*[Run(ended="lost")] * 2), [2.0] * 3).outcome == "lost"


def test_keys_are_those_of_the_case_in_its_problem():
    keys = get_keys(TRUTH)
    assert len(set(keys)) == 3 and keys == get_keys(json.dumps(TRUTH))
    assert not set(keys) & set(get_keys({"inputs": ["1"], "outputs": ["1\n"]})), "of another problem"
    assert not set(keys) & set(get_keys(TRUTH | {"fn_name": "f"}))


def test_a_second_run_has_all_the_time_and_teaches_the_limits():
    limits = TimeLimits()
    sandbox = Scripted("2")
    found = run_again(CODE, TRUTH, 1, sandbox, 30.0)
    assert sandbox.asked == [("2", 30.0, 300.0)], "whoever runs it at a low priority waits"
    assert found == (get_keys(TRUTH)[1], "right", 0.75, 30.0, True)
    limits.record([found])
    assert limits.get_limits(get_keys(TRUTH)) == [30.0, 2.0, 30.0]


@pytest.mark.parametrize(
    "output, expected, right",
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3\n\n", "1 2\n3\n", True),
        ("1\n2\n3", "1 2\n3", False),
        ("0.3333333", "0.33333331", True),
        ("0.3334", "0.3333", False),
        ("10000001", "10000002", False),
        ("1.0", "1", True),
        ("nan", "1.5", False),
        ("9" * 5000 + ".0", "8" * 5000 + ".0", False),
        ("YES", "yes", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_what_counts_as_the_same_output(output, expected, right):
    assert matches_output(output, expected) is right


@pytest.mark.parametrize(
    "output, expected, right",
    [
        ("[1, 2]", [1, 2], True),
        ("[1, 2]", [[1, 2]], True),  # APPS has the result in a list
        ("[1, 2]", [2, 1], False),
        ("0.1", 0.1000001, True),
        ("1", 2, False),
        ('{"a": [0.5]}', {"a": [0.5]}, True),
        ("1" + "0" * 400, 1.5, False),
        ("[" * 100_000, [], False),
        ("", None, False),
        ("null", None, True),
    ],
)
def test_what_counts_as_the_same_result(output, expected, right):
    assert matches_result(output, expected) is right


CALL = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}


@pytest.mark.parametrize(
    "program, outcome",
    [
        ("def add(a, b):\n    print('noise')\n    return a + b", "right"),
        ("class Solution:\n    def add(self, a: List[int], b):\n        return a + b", "right"),
        ("from __future__ import annotations\ndef add(a, b): return a", "wrong"),
        ("def sub(a, b): return a - b", "error"),
        ("def add(a, b): return {a}", "error"),
        ("def add(a, b:", "error"),
    ],
)
def test_a_function_that_is_called(program, outcome):
    score = score_response(f"```python\n{program}\n```", CALL, make_sandbox("none"), [5.0, 5.0])
    assert score.outcome == outcome, score


@pytest.mark.parametrize(
    "truth", ["{", "[1]", {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, {"inputs": ["1"]},
              {"inputs": ["1"], "outputs": ["{"], "fn_name": "f"}, pytest.param("[" * 100_000, id="deep")],
)  # fmt: skip
def test_what_are_no_test_cases_is_one_line(truth):
    with pytest.raises(ValueError, match="are no test cases") as raised:
        score_response(CODE, truth, Scripted(), [])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


class Service(BaseHTTPRequestHandler):
    """Answers with the next of ``answers``; a number is an HTTP status."""

    answers: list[Any] = []
    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.answers.pop(0)
        self.send_response(answer if isinstance(answer, int) else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch) -> Iterator[tuple[str, type[Service]]]:
    monkeypatch.setattr(fusion, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(Service, "answers", [])
    monkeypatch.setattr(Service, "asked", [])
    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/run_code", Service
    server.shutdown()
    thread.join()
    server.server_close()


def answer(status: str, run: str = "Finished", code: int = 0, out: str = "", err: str = "", took: float = 0.5) -> Any:
    result = {"status": run, "return_code": code, "stdout": out, "stderr": err, "execution_time": took}
    return {"status": status, "message": "", "compile_result": None, "run_result": result}


def test_a_service_scores_as_a_sandbox_here(service):
    url, server = service
    server.answers += [answer("Success", out="42\n"), answer("Success", out="1\n"), 504]
    server.answers += [answer("Failed", "TimeLimitExceeded", took=2.0)]
    score = score_response(CODE, TRUTH, make_sandbox({"url": url, "memory": 64 << 20}), [9.0, 2.0, 9.0])
    assert [(run.outcome, run.seconds) for run in score.runs] == [("right", 0.5), ("cut", 2.0)]
    assert server.asked[1] == {
        "language": "python", "code": "print(input())\n", "stdin": "1", "compile_timeout": 9.0, "run_timeout": 9.0,
        "memory_limit_MB": 64, "files": {}, "fetch_files": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    "found, ended",
    [
        (answer("Failed", code=1, err="Traceback\nValueError: x\n"), "error"),
        (answer("Failed", code=1, err="MemoryError"), "memory"),
        (answer("Success", out="x" * 2000), "output"),
        ({"status": "Failed", "compile_result": {"status": "Error", "stderr": "no"}, "run_result": None}, "error"),
    ],
)
def test_what_a_service_says_has_the_same_kinds(found, ended, service):
    url, server = service
    server.answers += [answer("Success", out="42"), found]
    with make_sandbox({"url": url, "output": 1000}).open("") as session:
        assert session.run("", 1.0, 1.0).ended == ended


@pytest.mark.parametrize("wrong", [500, {"status": "SandboxError", "message": "no room"}, ["?"]])
def test_a_service_that_fails_three_times_is_one_line(wrong, service):
    url, server = service
    server.answers += [wrong] * 3
    with pytest.raises(SandboxError, match=f"Sandbox Fusion at {url} failed 3 times: ") as raised:
        with fusion.SandboxFusion(url=url).open("") as session:
            session.run("", 1.0, 1.0)
    assert "\n" not in str(raised.value)
    server.answers += [wrong] * 3
    with pytest.raises(ValueError, match="rewards.sandbox: Sandbox Fusion at"):
        make_sandbox({"url": url}, "rewards.sandbox")
