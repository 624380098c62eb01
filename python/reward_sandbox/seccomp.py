"""A filter of system calls, for what namespaces and limits of a process leave open.

That is memory which no limit of a process counts (a program could fill the machine with it), looking into other
processes, and sockets that no network namespace holds, such as those to the host of a virtual machine.
"""

from __future__ import annotations

import errno
import platform
import struct

# struct seccomp_data: nr at 0, arch at 4, the low half of the first argument at 16.
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_FIRST_ODD_FAMILY = 17
"""Lowest socket family that is refused; AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK are below."""

REFUSED = {
    "x86_64": {
        "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64,
        "add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425, "userfaultfd": 323,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "perf_event_open": 298,
    },
    "aarch64": {
        "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "msgget": 186, "semget": 190,
        "add_key": 217, "request_key": 218, "keyctl": 219, "io_uring_setup": 425, "userfaultfd": 282,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "perf_event_open": 241,
    },
}  # fmt: skip
"""Numbers of the system calls that fail with EPERM."""
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_X32 = 0x40000000
"""Lowest number of a second set of the same calls on x86_64."""


def make_filter() -> bytes:
    """A program in classic BPF, as ``bwrap --seccomp`` reads it; empty for a machine whose numbers are not here."""
    machine = platform.machine()
    if machine not in REFUSED:
        return b""
    code = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCH[machine]), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL),
    ]  # fmt: skip
    for number in REFUSED[machine].values():
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    code += [(_EQUAL, 0, 3, _SOCKET[machine]), (_LOAD, 0, 0, 16), (_AT_LEAST, 0, 1, _FIRST_ODD_FAMILY),
             (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]  # fmt: skip
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
