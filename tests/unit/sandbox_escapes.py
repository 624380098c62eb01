"""What a program may try in a sandbox; run by another user as a command: ``sandbox_escapes.py SANDBOX STDIN``.

Needs the standard library only, since an environment of root cannot be read by another user.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from reward_sandbox.local import Bubblewrap
from reward_sandbox.runs import Resources

MEMORY, PROCESSES, TMP, OUTPUT = 256 << 20, 6, 8 << 20, 100_000
SECRET = "a key of the job"
LIMIT, MAXIMUM = 0.1, 60.0
CUT = ("endless", "sleeps", "ignores_signals", "fork_bomb")
"""Programs that do not end; the others have all the time."""

TRY = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, action):
    try:
        if action() != -1:
            print(name)
    except OSError:
        pass
"""
"""Programs that begin with it print what they could do."""

ESCAPES = {
    "endless": "while True: pass",
    "sleeps": "import time; time.sleep(60)",
    "ignores_signals": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass""",
    "fork_bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "many_processes": """
import os, time
count = 0
try:
    while count < 300:
        if not os.fork():
            time.sleep(60)
        count += 1
except OSError:
    pass
print(count)""",
    "much_memory": "text = 'a' * (2 << 30)",
    "slow_memory": "kept = []\nwhile True: kept.append(bytearray(10 << 20))",
    "memory_of_no_process": TRY + """
attempt("memfd", lambda: os.memfd_create("x"))
attempt("shmget", lambda: libc.shmget(0, 1 << 20, 0o1600))""",
    "files_outside": TRY + """
for folder in ("/", "/usr", "/etc", "/bin", "/dev", "/root", "/home", "/var", "/work", "/proc/sys/kernel"):
    attempt("wrote to " + folder, lambda: os.close(os.open(folder + "/x", os.O_CREAT | os.O_WRONLY)))
for name in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/root", "/home", "/var", "/sys", "/run", "/work", "/opt"):
    attempt("saw " + name, lambda: os.stat(name) and 0)
attempt("remounted", lambda: libc.mount(b"none", b"/usr", None, 32, None))
attempt("mounted", lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))""",
    "full_tmp": """
import os
for folder in ("/tmp", "/dev/shm"):
    total = 0
    try:
        for number in range(64):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                while file.tell() < 4 << 20:
                    total += file.write(bytes(1 << 20))
    except OSError:
        pass
    print(total)""",
    "much_output": "import os\npiece = b'x' * (1 << 20)\nfor _ in range(3000): os.write(1, piece)",
    "much_on_stderr": "import os\npiece = b'x' * (1 << 20)\nfor _ in range(50): os.write(2, piece)\nprint('done')",
    "daemon": """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 20)
        time.sleep(60)
    os._exit(0)
print("done")""",
    "holds_stdout": "import os, time\nif not os.fork(): time.sleep(60)\nprint('done')",
    "kills": """
import os, signal
for target in (1, os.getppid(), -1):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        pass
print("done")""",
    "network": TRY + """
def connect(family, address):
    with socket.socket(family) as made:
        made.settimeout(1)
        made.connect(address)
attempt("this machine", lambda: connect(socket.AF_INET, ("127.0.0.1", int(input()))))
attempt("the world", lambda: connect(socket.AF_INET, ("1.1.1.1", 53)))
attempt("the host", lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close())""",
    "secrets": """
import glob, os
found = "".join(map(str, os.environ.items()))
for name in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        found += open(name).read()
    except OSError:
        pass
print("SECRET" in found or "a key of the job" in found)""",
    "other_processes": TRY + """
print(sorted(name for name in os.listdir("/proc") if name.isdigit()))
attempt("ptrace", lambda: libc.ptrace(16, 1, 0, 0))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))""",
    "more_rights": TRY + """
import resource
attempt("setuid", lambda: os.setuid(0))
attempt("user namespace", lambda: libc.unshare(0x10000000))
attempt("chroot", lambda: os.chroot("/tmp"))
for name in ("AS", "NPROC", "FSIZE", "NOFILE"):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (-1, -1))
        print(name)
    except (OSError, ValueError):
        pass
print(os.getuid(), open("/proc/self/status").read().split("CapEff:")[1].split()[0])""",
    "forged_answer": """
import os, struct
text = b'{"ended": "exit", "output": 42, "error": "", "wall": "x", "cpu": 0, "waited": 0}'
for fd in range(3, 64):
    for name in (f"/proc/1/fd/{fd}", f"/proc/self/fd/{fd}"):
        try:
            os.write(os.open(name, os.O_WRONLY | os.O_NONBLOCK), struct.pack(">I", len(text)) + text)
        except OSError:
            pass
print("done")""",
}  # fmt: skip


def find_members(namespace: str) -> list[int]:
    """Processes of a pid namespace, as far as this user may look; one that has ended, and waits for init, is none."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.readlink(folder / "ns/pid") == namespace:
                if "\nState:\tZ" not in (folder / "status").read_text():
                    found.append(int(folder.name))
        except OSError:
            pass
    return found


def attempt(sandbox: Bubblewrap, name: str, stdin: str = "") -> dict[str, Any]:
    """What happened, and which processes are left of the sandbox."""
    small = replace(sandbox, resources=Resources(memory=MEMORY, processes=PROCESSES, tmp=TMP, output=OUTPUT))
    with small.open(ESCAPES[name]) as session:
        pid = session.process.pid
        child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        namespace = os.readlink(f"/proc/{child}/ns/pid")
        seen = find_members(namespace)
        run = session.run(stdin, LIMIT if name in CUT else MAXIMUM, MAXIMUM)
    return asdict(run) | {"seen": len(seen), "left": find_members(namespace)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    made = Bubblewrap(bwrap=given["bwrap"], python=given["python"], folders=tuple(given["folders"]))
    print(json.dumps({name: attempt(made, name, sys.argv[2]) for name in ESCAPES}))
