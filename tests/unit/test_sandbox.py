"""Programs that try to get out of the sandbox, started by root and by another user; nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_sandbox import local, program_runner, sandbox
from reward_sandbox.local import Bubblewrap, LocalSession
from reward_sandbox.programs import score_response
from reward_sandbox.runs import SandboxError

from . import sandbox_escapes as escapes

pytestmark = [pytest.mark.unit, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
USER = 12345
"""Somebody who owns nothing."""


@pytest.fixture(scope="module")
def bubblewrap() -> Bubblewrap:
    try:
        found = sandbox.make_sandbox(None)
    except ValueError as error:
        pytest.skip(str(error))
    assert isinstance(found, Bubblewrap)
    return found


@pytest.fixture(scope="module", params=["this user", pytest.param("another user", marks=pytest.mark.long)])
def attempt(request, bubblewrap) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What happens when a user tries something, by its name.  Another user tries all in one process."""
    with pytest.MonkeyPatch.context() as patched, socket.create_server(("127.0.0.1", 0)) as server:
        patched.setenv("SECRET", escapes.SECRET)
        stdin = f"{server.getsockname()[1]}\n"
        if request.param == "this user":
            yield lambda name: escapes.attempt(bubblewrap, name, stdin)
        else:
            yield attempt_as_another(bubblewrap, stdin).__getitem__


def attempt_as_another(found: Bubblewrap, stdin: str) -> dict[str, dict[str, Any]]:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    given = json.dumps({"bwrap": found.bwrap, "python": found.python, "folders": found.folders})
    command = [found.python, "-m", "tests.unit.sandbox_escapes", given, stdin]
    variables = {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", "SECRET": escapes.SECRET}
    done = subprocess.run(
        command, user=USER, group=USER, extra_groups=[], cwd="/", env=variables, capture_output=True, text=True
    )
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"another user cannot read this checkout: {done.stderr.splitlines()[-1]}")
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


EXPECTED: dict[str, tuple[set[str], str]] = {
    "endless": ({"cut"}, ""),
    "sleeps": ({"cut"}, ""),
    "ignores_signals": ({"cut"}, ""),
    "fork_bomb": ({"cut"}, ""),
    "much_memory": ({"memory"}, ""),
    "slow_memory": ({"memory"}, ""),
    "memory_of_no_process": ({"exit"}, ""),
    "files_outside": ({"exit"}, ""),
    "full_tmp": ({"exit"}, f"{escapes.TMP}\n{escapes.TMP}\n"),
    "much_output": ({"output"}, "x" * escapes.OUTPUT),
    "much_on_stderr": ({"exit"}, "done\n"),
    "daemon": ({"exit"}, "done\n"),
    "holds_stdout": ({"exit"}, "done\n"),
    "kills": ({"exit"}, "done\n"),
    "network": ({"exit"}, ""),
    "secrets": ({"exit"}, "False\n"),
    "other_processes": ({"exit"}, "['1', '2']\n"),
    "more_rights": ({"exit"}, "65534 0000000000000000\n"),
    "forged_answer": ({"exit", "lost"}, ""),
}


@pytest.mark.parametrize("name", escapes.ESCAPES)
def test_an_escape(name, attempt):
    found = attempt(name)
    assert found["seen"] == 1 and not found["left"], found
    if name == "many_processes":
        assert found["ended"] == "exit" and int(found["output"]) < escapes.PROCESSES, found
        return
    ended, output = EXPECTED[name]
    assert found["ended"] in ended, found
    if name == "forged_answer":
        assert isinstance(found["output"], str) and isinstance(found["wall"], float), found
    else:
        assert found["output"] == output, found
    if found["ended"] == "cut":
        own = found["wall"] - found["waited"]
        assert escapes.LIMIT - 1e-9 <= own and found["wall"] < escapes.MAXIMUM, found


def test_a_sandbox_that_is_killed_in_the_middle_gives_the_same_reward(bubblewrap, monkeypatch):
    truth = {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "6"]}
    kills = []

    def read(self, size, deadline, really=LocalSession._read):
        if self.asked == 3 and not kills:  # the program, the first case; the second is in the sandbox now
            kills.append(self.process.pid)
            self.process.kill()
        return really(self, size, deadline)

    def ask(self, message, seconds, really=LocalSession._ask):
        self.asked = getattr(self, "asked", 0) + 1
        return really(self, message, seconds)

    monkeypatch.setattr(LocalSession, "_read", read)
    monkeypatch.setattr(LocalSession, "_ask", ask)
    score = score_response("```python\nprint(2 * int(input()))\n```", truth, bubblewrap, [5.0] * 3, maximum=30.0)
    assert kills and score.value == 1 and [run.outcome for run in score.runs] == ["right"] * 3


def test_what_a_case_leaves_does_not_run_in_the_next(bubblewrap):
    program = "import os, time\nprint([n for n in os.listdir('/proc') if n.isdigit()])\nos.fork() or time.sleep(60)"
    with bubblewrap.open(program) as session:
        seen = [session.run("", 5.0, 5.0).output.count(",") for _ in range(2)]
    assert seen == [1, 1], "the process inside, and the program"


def find_inside(session: LocalSession) -> int:
    """The process inside, whose parent is bwrap."""
    pid = session.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def test_a_process_inside_that_does_not_end_is_killed(bubblewrap, monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.1)
    with bubblewrap.open("") as session:
        child = find_inside(session)
        namespace = os.readlink(f"/proc/{child}/ns/pid")
        os.kill(child, signal.SIGSTOP)
    assert not escapes.find_members(namespace)


WORKER = """
import sys
from pathlib import Path
from reward_sandbox.sandbox import make_sandbox
with make_sandbox(sys.argv[1]).open(sys.argv[2]) as session:
    pid = session.process.pid
    print(Path(f"/proc/{pid}/task/{pid}/children").read_text(), flush=True)
    session.run("", 60.0, 60.0)
"""


def test_a_worker_that_is_killed_takes_its_sandbox_along(bubblewrap):
    command = [sys.executable, "-c", WORKER, "bubblewrap", "while True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        inside = os.pidfd_open(int(worker.stdout.readline()))
        worker.kill()
    with os.fdopen(inside):
        assert select.select([inside], [], [], 20.0)[0], "the kernel ends all that is in there with this process"


def test_that_does_not_depend_on_the_process_inside(bubblewrap):
    """Which may have no core for a long time; here it is stopped.  And nobody waits for the worker."""
    command = [sys.executable, "-c", WORKER, "bubblewrap", "while True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        pid = int(worker.stdout.readline())
        with os.fdopen(os.pidfd_open(pid)) as inside:
            os.kill(pid, signal.SIGSTOP)
            worker.kill()
            ended, _, _ = select.select([inside], [], [], 20.0)
            signal.pidfd_send_signal(inside.fileno(), signal.SIGCONT)
    assert ended


def test_a_worker_that_is_killed_takes_a_program_without_sandbox_along(tmp_path):
    line = tmp_path / "line"
    os.mkfifo(line)
    program = (
        f"import os\nfile = open({str(line)!r}, 'w')\nprint(os.getppid(), os.getcwd(), file=file)\nfile.flush()\n"
        "while True: pass"
    )
    command = [sys.executable, "-c", WORKER, "none", program]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as worker, line.open() as said:
        parent, folder = said.readline().split()
        assert Path(folder).is_dir()
        with os.fdopen(os.pidfd_open(int(parent))) as inside:
            worker.kill()
            assert select.select([said], [], [], 20.0)[0] and said.read() == "", "the end of it"
            assert select.select([inside], [], [], 20.0)[0]
    assert not Path(folder).exists(), "and of its files"


def test_a_process_inside_that_says_nothing_is_cut_and_is_never_asked_again(bubblewrap, monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.1)
    with bubblewrap.open("print(input())") as session:
        child = find_inside(session)
        os.kill(child, signal.SIGSTOP)
        assert session.run("1", 0.1, 0.1).ended == "cut"
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGCONT)
        assert session.run("2", 5.0, 5.0).ended == "lost", "and not the answer to the first"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that another user can read: root starts bwrap as one."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def stand_in(folder: Path, text: str) -> str:
    file = folder / "bwrap"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_a_machine_without_user_namespaces_is_told_the_ways_out(folder, monkeypatch):
    said = "bwrap: No permissions to create a new namespace"
    closed = stand_in(folder, f"echo '{said}' >&2; exit 1")
    monkeypatch.setattr(sandbox, "_find_bwrap", lambda: iter([closed]))
    with pytest.raises(ValueError) as raised:
        sandbox.make_sandbox(None, "rewards.sandbox")
    line = str(raised.value)
    assert line.startswith(f"rewards.sandbox is bubblewrap, which does not start here ({closed}: {said}): ")
    assert "{url: http://HOST:8080/run_code}" in line and "write sandbox: none" in line and "\n" not in line


def test_really_without_user_namespaces(bubblewrap):
    """The process runs in a sandbox that closes them."""
    program = "from reward_sandbox.sandbox import make_sandbox\nmake_sandbox(None)"
    closed = [bubblewrap.bwrap, "--unshare-user", "--disable-userns", "--uid", "1000", "--bind", "/", "/"]
    command = [*closed, "--dev", "/dev", "--proc", "/proc", "--", sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].startswith("ValueError: sandbox is bubblewrap, which does not start here ("), (
        done
    )
    assert done.stderr.endswith(f"): {sandbox.WAYS_OUT}\n")


def test_one_bwrap_that_does_not_start_leaves_the_next(bubblewrap, folder, monkeypatch):
    closed = stand_in(folder, "exit 1")
    monkeypatch.setattr(sandbox, "_find_bwrap", lambda: iter([closed, bubblewrap.bwrap]))
    found = sandbox.make_sandbox(None)
    assert isinstance(found, Bubblewrap) and found.bwrap == bubblewrap.bwrap


def test_a_container_that_allows_no_new_proc(bubblewrap, folder, monkeypatch):
    refuse = f'for word; do [ "$word" = --proc ] && exit 1; done; exec {bubblewrap.bwrap} "$@"'
    monkeypatch.setattr(sandbox, "_find_bwrap", lambda: iter([stand_in(folder, refuse)]))
    found = sandbox.make_sandbox({"python": bubblewrap.python})
    assert "without a /proc: time limits are wall time" in found.describe()
    with found.open("import os\nprint(os.path.exists('/proc'))\nwhile True: pass") as session:
        run = session.run("", 0.1, 5.0)
    assert (run.ended, run.output, run.waited) == ("cut", "", 0.0) and run.wall >= 0.1


def test_a_folder_that_the_user_of_programs_may_not_enter_is_named(bubblewrap, folder, monkeypatch):
    """Either the folder of bwrap or that of the interpreter; as soon as he may, it works."""
    if os.geteuid() != 0:
        pytest.skip("only root's programs run as another user")
    (inside := folder / "venv" / "bin").mkdir(parents=True)
    bwrap, python = inside / "bwrap", inside / "python"
    bwrap.write_text(f'#!/bin/sh\nexec {bubblewrap.bwrap} "$@"')
    bwrap.chmod(0o755)
    python.symlink_to("/usr/bin/python3")
    inside.parent.chmod(0o700)
    for find, setting in (
        (lambda: iter([str(bwrap)]), None),
        (lambda: iter([bubblewrap.bwrap]), {"python": str(python)}),
    ):
        monkeypatch.setattr(sandbox, "_find_bwrap", find)
        with pytest.raises(ValueError) as raised:
            sandbox.make_sandbox(setting, "rewards.sandbox")
        line, needed = str(raised.value), bwrap if setting is None else python
        assert f"(root's programs run as user 65534, who may not enter {inside.parent}, where {needed} is): " in line
        assert f"): chmod o+x {inside.parent}, take another bwrap" in line and "\n" not in line
        assert "user namespaces" not in line, "they are not what is missing"
    inside.parent.chmod(0o711)
    monkeypatch.setattr(sandbox, "_find_bwrap", lambda: iter([str(bwrap)]))
    assert sandbox.make_sandbox(None).bwrap == str(bwrap)


def test_no_bwrap_at_all(monkeypatch):
    monkeypatch.setattr(sandbox, "_find_bwrap", lambda: iter([]))
    with pytest.raises(ValueError, match=r"not installed: pip install 'sglang_pat\[rewards\]'"):
        sandbox.make_sandbox(None)


def test_none_has_to_be_written_and_keeps_the_limits():
    found = sandbox.make_sandbox({"kind": "none", "output": 1000, "memory": escapes.MEMORY})
    for name, ended in {"endless": "cut", "much_memory": "memory", "much_output": "output"}.items():
        with found.open(escapes.ESCAPES[name]) as session:
            assert session.run("", escapes.LIMIT, escapes.MAXIMUM).ended == ended
    assert "with all its rights" in found.describe()


def test_what_is_cut_reports_the_clock_that_cut_it(monkeypatch):
    clock, cpu = iter([0.0, 10.0, 10.0, 20.0]), iter([1.5, 9.0])  # it gets a core after it was decided to cut it
    program = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(program_runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(program_runner, "look", lambda pid: program_runner.Look(next(cpu), 1))
    monkeypatch.setattr(program_runner, "measure_children", lambda: 0.0)
    monkeypatch.setattr(program_runner, "end_all", lambda pid: None)
    monkeypatch.setattr(program_runner.os, "fork", lambda: program.pid)
    with open(os.devnull) as control:
        found = program_runner.run_case(
            {"limit": 1.0, "maximum": 60.0, "stdin": "", "output": 100}, control.fileno(), {}
        )
    assert found and (found["ended"], found["wall"], found["waited"]) == ("cut", 10.0, 8.5)


def follow(*looks: tuple[float, float, int], cores: int = 2) -> float:
    """Seconds by the clock after (wall, CPU, ready threads) at some moments."""
    clock = program_runner.Clock(0.0, cores)
    for wall, cpu, ready in looks:
        clock.move(wall, program_runner.Look(cpu, ready))
    return clock.seconds


@pytest.mark.parametrize(
    "looks, seconds",
    [
        ([(1.0, 1.0, 1), (2.0, 2.0, 1)], 2.0),  # alone
        ([(1.0, 0.1, 1), (2.0, 0.2, 1)], 0.2),  # others have the cores
        ([(1.0, 2.0, 14), (2.0, 4.0, 14)], 2.0),  # children, of which not all have a core
        ([(1.0, 0.5, 14), (2.0, 1.0, 14)], 0.5),  # they, and others have three quarters
        ([(0.1, 0.0, 0), (5.1, 0.0, 0)], 5.05),  # it sleeps
        ([(0.1, 0.0, 0), (1.1, 0.0, 0), (1.2, 0.2, 14), (2.2, 2.2, 14)], 2.1),  # it sleeps, and then has children
    ],
)
def test_the_clock_counts_what_a_program_takes_and_not_what_others_do(looks, seconds):
    assert follow(*looks) == pytest.approx(seconds, abs=0.08)


def test_without_a_look_the_clock_is_the_walls():
    clock = program_runner.Clock(0.0, 2)
    clock.move(3.0, None)
    assert clock.seconds == 3.0


FAMILIES = {
    "children": "import os\nfor _ in range(3): os.fork() or exec('while True: pass')\nos.wait()",
    "threads": "import threading\ndef f():\n  while True: pass\nfor _ in range(3): threading.Thread(target=f).start()",
    "left the session": "import os\nif not os.fork():\n  os.setsid()\n  if not os.fork():\n    while True: pass\n"
    "  os._exit(0)\nos.wait()\nwhile True: pass",
}


@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("none", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_busy_family_is_cut_by_what_all_of_it_takes(name, kind):
    try:
        found = sandbox.make_sandbox({"kind": kind})
    except ValueError as error:
        pytest.skip(str(error))
    with found.open(FAMILIES[name]) as session:
        run = session.run("", escapes.LIMIT, 60.0)
    assert run.ended == "cut" and escapes.LIMIT <= round(run.seconds, 6) < 30, run


@pytest.mark.parametrize(
    "setting, said",
    [
        ("docker", "sandbox is 'docker', must be bubblewrap, none"),
        ({"memory_mb": 1}, "sandbox has no setting 'memory_mb'; choose from kind, url, python, memory"),
        ({"memory": "1G"}, "sandbox.memory is '1G', must be a whole number"),
        ({"url": "fusion:8080"}, "begins with http:// or https://"),
        ({"url": "http://x", "kind": "none"}, "without kind and python"),
        ({"python": 3.11}, "sandbox.python is 3.11, must be the path of an interpreter"),
        ({"python": "/no/python"}, "sandbox.python is '/no/python', must be the path of an interpreter"),
    ],
)
def test_a_wrong_setting_is_one_line(setting, said):
    with pytest.raises(ValueError) as raised:
        sandbox.make_sandbox(setting)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_command_that_cannot_be_started_is_one_line():
    found = Bubblewrap(bwrap="/no/bwrap", python=sys.executable)
    with pytest.raises(SandboxError, match="^/no/bwrap: No such file or directory$"):
        with found.open(""):
            pass
