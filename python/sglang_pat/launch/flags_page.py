"""docs/flags.md: our flags, and what ``--adaptive-tp`` makes of every flag of SGLang.

python -m sglang_pat.launch.flags_page > docs/flags.md
"""

from __future__ import annotations

import dataclasses
import sys

from sglang_pat.cpu import shim

shim.ensure()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_pat import settings  # noqa: E402
from sglang_pat.launch import flags  # noqa: E402

LIMITS = """\
## Limits of a replica

These hold for each replica, as in stock SGLang with `--dp`. So the engine takes as many times more
as it has replicas.

- `--max-running-requests`: how many requests a replica decodes at once. A merged replica has the
  same limit.
- `--max-queued-requests`: how many requests wait in a replica. A merge may bring more together.
  None is refused for that, only the next that comes.
- Priorities order the requests of a replica. A request preempts only those of its own replica.""".splitlines()


def page() -> str:
    """docs/flags.md."""
    found = flags.classified()
    fields = [field.name for field in dataclasses.fields(ServerArgs)]
    lines = [
        "# Flags",
        "",
        "Made by `python -m sglang_pat.launch.flags_page`; do not edit.",
        "",
        "## Ours",
        "",
        *settings.table(),
        "",
        "## SGLang's, under --adaptive-tp",
        "",
        "Every field of SGLang's `ServerArgs`, in its order.",
        "",
        "- **works**: the test that is named switches with it.",
        "- **as in SGLang**: the adaptive engine has no part in it; why no test here shows it.",
        "- **GPU, not run yet**: accepted; takes effect on GPUs, where it has not been run with switches.",
        "- **no effect**: accepted and ignored, for the reason given.",
        "- **refused**: at start, in one line that says what to change.",
        "",
        "| flag | status | test or reason |",
        "| --- | --- | --- |",
    ]
    for name in fields:
        status, note = found[name]
        lines.append(f"| `{name}` | {status} | {f'`{note}`' if status == 'works' else note} |")
    lines += ["", *LIMITS, "", "Variables that are refused:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in flags.ENVIRONMENT.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
