"""docs/flags.md: our flags, and what ``--adaptive-tp`` makes of every flag of SGLang.

python -m sglang_pat.sglang.launch.flags_page > docs/flags.md
"""

from __future__ import annotations

import dataclasses
import sys

from sglang_pat.sglang import cpu_shim

cpu_shim.ensure()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_pat import settings  # noqa: E402
from sglang_pat.sglang.launch import flags  # noqa: E402


def page() -> str:
    """docs/flags.md."""
    found = flags.classified()
    fields = [field.name for field in dataclasses.fields(ServerArgs)]
    lines = [
        "# Flags",
        "",
        "Made by `python -m sglang_pat.sglang.launch.flags_page`; do not edit.",
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
    lines += ["", "Variables that are refused:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in flags.ENVIRONMENT.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
