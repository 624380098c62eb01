"""Prompts of a round on their way in: how long each turn of the event loop is; for ``control_plane.py``."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from _round_turns import Collector, now_of

from sglang_pat.cpu import shim
from sglang_pat.testing import models

PROMPTS, TEXT_TOKENS, IDS = 1280, 345, 1000
NEW_TOKENS, CONTEXT = 4096, 8192


def tokenizer() -> Any:
    """SmolLM2's."""
    if shim.needed():
        shim.install()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models.make_smollm2(Path(".cache/models/smollm2")))


def bodies(tok: Any) -> dict[str, bytes]:
    """Of ``POST /pat/rollout``, by what prompts are given as."""
    rng = random.Random(0)
    words = [word for word in map(tok.decode, range(len(tok))) if word[0] == " " and word[1:].isalpha()]
    given = {
        "text": lambda: "".join(rng.choices(words, k=TEXT_TOKENS)),
        "input_ids": lambda: rng.choices(range(len(tok)), k=IDS),
    }
    size = {"num_prompts": PROMPTS * 4 // 5, "num_responses": 16}
    return {
        field: msgspec.json.encode(size | {"prompts": [{"key": [0, i], field: one()} for i in range(PROMPTS)]})
        for field, one in given.items()
    }


async def intake_slices() -> list[dict[str, Any]]:
    """Milliseconds: to read the body, the longest turn of the event loop after that, and all turns together."""
    tok, rows = tokenizer(), []
    from sglang_pat.server.intake import Intake, parse

    manager = SimpleNamespace(
        tokenizer=tok, context_len=CONTEXT, max_req_input_len=None, model_config=SimpleNamespace(vocab_size=len(tok))
    )
    gc.collect()
    gc.freeze()
    collector = Collector()
    for field, data in bodies(tok).items():
        begun = now_of(collector)
        body = parse(data)
        read = now_of(collector) - begun
        coming, turns = asyncio.ensure_future(Intake(manager).prompts(body.prompts, NEW_TOKENS)), []
        while not coming.done():
            begun = now_of(collector)
            await asyncio.sleep(0)
            turns.append(now_of(collector) - begun)
        tokens = sum(len(prompt["input_ids"]) for _, prompt in coming.result()) / PROMPTS
        rows.append({
            "prompts": PROMPTS, "given": field, "tokens": tokens, "body_mb": len(data) / 1e6, "read_ms": 1e3 * read,
            "turn_ms": 1e3 * max(turns), "all_ms": 1e3 * sum(turns),
        })  # fmt: skip
    gc.callbacks.clear()
    return rows
