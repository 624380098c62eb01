"""SGLang's own tests against an adaptive engine that switches all the time: ``make test-peers SGLANG_SOURCE=DIR``.

DIR is a checkout of SGLang at the tag of :data:`sglang_pat.version.SGLANG_VERSIONS`.  Without one nothing is run.  Each
test that ends otherwise than in SGLang's own setting is named in ``differences.txt`` with the reason.  One that is not
there fails, and so does one that is there and passes.  ``STOCK=1`` runs the same tests without ``--adaptive-tp``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sglang_pat.version import SGLANG_VERSIONS

FILES = (
    "core/test_srt_endpoint.py",
    "core/test_srt_engine.py",
    "core/test_request_queue_validation.py",
    "core/test_hidden_states.py",
    "scheduler/test_scheduler_control.py",
    "scheduler/test_priority_scheduling.py",
    "constrained_decoding/test_constrained_decoding.py",
    "openai_server/basic/test_openai_server.py",
    "openai_server/features/test_json_mode.py",
    "openai_server/features/test_openai_server_ebnf.py",
    "openai_server/features/test_openai_server_hidden_states.py",
    "openai_server/validation/test_large_max_new_tokens.py",
    "openai_server/validation/test_matched_stop.py",
    "openai_server/validation/test_openai_server_ignore_eos.py",
    "openai_server/validation/test_request_length_validation.py",
    "radix_cache/test_radix_attention.py",
    "sampling/test_penalty.py",
)
"""Files below ``test/registered``: endpoints, ``Engine``, scheduler control, priorities, queues, grammars, OpenAI.

Not here: ``scheduler/test_retract_decode.py`` (MMLU's questions), ``rl/test_update_weights_from_tensor.py`` (knows
the shapes and values of Llama-3.2-1B, and names CUDA) and ``observability/test_metrics.py`` (asks for SGLang's device
timer, which needs CUDA; what is left of it starts no engine)."""


def main(argv: list[str]) -> int:
    source = os.environ.get("SGLANG_SOURCE")
    if not source:
        print(f"skipped: give SGLANG_SOURCE=DIR, a checkout of SGLang at v{SGLANG_VERSIONS[0]}")
        return 0
    folder = Path(source) / "test" / "registered"
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        print(f"error: SGLANG_SOURCE={source} lacks {', '.join(missing)}: check out the tag v{SGLANG_VERSIONS[0]}")
        return 2
    # Ranks load what a test gives them by reference: its logit processors.
    folders = dict.fromkeys(str((folder / name).parent) for name in FILES)
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *folders]).strip(os.pathsep)
    chosen = [name for name in FILES if not argv or any(word in name for word in argv if not word.startswith("-"))]
    options = [word for word in argv if word.startswith("-")]
    plugins = ["-p", "tests.peers.plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Without this project's and SGLang's own settings of pytest.
    return pytest.main(
        ["-c", os.devnull, "--rootdir", str(folder), "-ra", "--durations=10", *plugins, *options]
        + [str(folder / name) for name in chosen]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
