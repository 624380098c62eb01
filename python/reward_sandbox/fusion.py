"""Programs in a Sandbox Fusion service, by its ``run_code``."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reward_sandbox.runs import Resources, Run, SandboxError, format_one_line

WAIT_SECONDS = 10.0
"""Seconds that a request may take besides the program, as in verl's client."""
TRIES = 3
PAUSE_SECONDS = 1.0
"""Pause before the second try; the one before the third is twice as long."""


@dataclass(frozen=True, kw_only=True)
class SandboxFusion:
    """A service at ``url``, with ``/run_code`` at its end.

    Its clock is the wall time that the service says.
    """

    url: str
    resources: Resources = field(default_factory=Resources)

    @contextlib.contextmanager
    def open(self, program: str) -> Iterator[FusionSession]:
        """A session; nothing is sent yet."""
        yield FusionSession(self, program)

    def describe(self) -> str:
        return f"Sandbox Fusion at {self.url}"


class FusionSession:
    def __init__(self, service: SandboxFusion, program: str) -> None:
        self.service, self.program = service, program

    def run(self, stdin: str, limit: float, maximum: float) -> Run:
        """See :class:`reward_sandbox.runs.Session`; a call that fails is tried again.

        Raises:
            SandboxError: it fails three times.
        """
        seconds = min(limit, maximum)
        body = {
            "language": "python",
            "code": self.program,
            "stdin": stdin,
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": max(1, self.service.resources.memory >> 20),
            "files": {},
            "fetch_files": [],
        }
        return self._read_run(self._post(body, 2 * seconds + WAIT_SECONDS), seconds)

    def _post(self, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        reason = ""
        for attempt in range(TRIES):
            time.sleep(attempt * PAUSE_SECONDS)
            request = urllib.request.Request(self.service.url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=seconds) as response:
                    answer = json.load(response)
                if isinstance(answer, dict) and answer.get("status") in ("Success", "Failed"):
                    return answer
                reason = f"it answered {str(answer)[:200]}"
            except (OSError, ValueError) as error:
                reason = format_one_line(error)
        raise SandboxError(f"Sandbox Fusion at {self.service.url} failed {TRIES} times: {reason}")

    def _read_run(self, answer: dict[str, Any], limit: float) -> Run:
        result = answer.get("run_result") or answer.get("compile_result") or {}
        output, errors = result.get("stdout") or "", (result.get("stderr") or "").strip()
        if result.get("status") == "TimeLimitExceeded":
            ended = "cut"
        elif answer["status"] == "Success":
            ended = "exit"
        else:
            ended = "memory" if "MemoryError" in errors else "error"
        if len(output) > self.service.resources.output:
            ended = "output"
        wall = float(result.get("execution_time") or (limit if ended == "cut" else 0.0))
        return Run(
            ended=ended,
            output=output[: self.service.resources.output],
            error=errors.splitlines()[-1][-500:] if errors else "",
            wall=wall,
        )
