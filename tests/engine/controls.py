"""What the test files about an operator's requests share; no test of its own."""

from __future__ import annotations

from typing import Any

from sglang_pat.testing.server import Server


def body(seed: int, tokens: int, **fields: Any) -> dict[str, Any]:
    ids = [6 + (seed * 97 + i * 31) % 490 for i in range(12)]
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling} | fields


def unharmed(server: Server) -> None:
    """The engine answers, and switches."""
    server.reconfigure(1)
    up = server.reconfigure(2)
    down = server.reconfigure(1)
    assert up["to_tp"] == 2 and down["to_tp"] == 1
    assert len(server.generate([body(1, 5)])[0]["output_ids"]) == 5
