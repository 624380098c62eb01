"""An agent loop in miniature: the model speaks, a tool answers over HTTP, up to four turns a sample, in rounds.

    python examples/agent_rollout.py [--model DIR] [--prompts 16] [--mode strict|reorder|partial]

Starts a tool server of its own on a free port of this machine.  Prints a line a round: turns and generated tokens of
the samples that were kept, what the tool took, and what waits.  Without ``--model`` a small random model is made; its
answers mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
import urllib.request
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import sglang_pat
from profiler.launch import set_environment
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group
from sglang_pat.rollout.rules import MODES, Rules
from sglang_pat.rollout.turns import Turn
from sglang_pat.testing import models


class Tool(BaseHTTPRequestHandler):
    """A tool that counts the characters that it is sent, for up to 0.3 s, and says whether they are enough."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chance = zlib.crc32(asked["text"].encode())
        time.sleep(chance % 300 / 1e3)
        answer = {"text": f"{len(asked['text'])} characters. Say it again.", "done": asked["turn"] >= chance % 4}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line for each call is too much."""


class Agent:
    """The environment: what the tool says becomes the next message of the chat."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        self._url = url
        self._tokenizer = tokenizer
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.calls, self.seconds = 0, 0.0

    async def __call__(self, turn: Turn) -> list[int] | None:
        begun = time.perf_counter()
        answer = await asyncio.to_thread(self._post, {"turn": turn.number, "text": turn.text})
        self.calls += 1
        self.seconds += time.perf_counter() - begun
        if answer["done"]:
            return None
        return self.tokens(f"\n<|im_start|>tool\n{answer['text']}<|im_end|>\n<|im_start|>assistant\n")

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _post(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self._direct.open(self._url, json.dumps(asked).encode(), timeout=30) as answer:
            return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with safetensors")
    parser.add_argument("--prompts", type=int, default=16, help="of the epoch (default: 16)")
    parser.add_argument("--mode", choices=MODES, default="partial")
    args = parser.parse_args()
    model = args.model or models.make_random("llama", Path(".cache/models/llama"))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Tool)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    set_environment(quiet=True)  # on a CPU SGLang warns of much that it lacks there
    print("starting the engine", flush=True)
    engine = sglang_pat.Engine(
        model_path=str(model), tp_size=1, dp_size=2, adaptive_tp=True, pat_switch_at=3,
        dtype="float32", max_total_tokens=16384, log_level="error",
    )  # fmt: skip
    agent = Agent(f"http://127.0.0.1:{server.server_port}", engine.tokenizer_manager.tokenizer)
    # Of all turns of a sample together.
    sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 200}
    if args.model is None:
        # Of 512 tokens that are about equally likely 16 end a turn: most are short, some are not.
        sampling["stop_token_ids"] = list(range(100, 116))
    admitter = Admitter(Rules(num_prompts=4, num_responses=2, mode=args.mode))
    question = "<|im_start|>user\nTell me about {}.<|im_end|>\n<|im_start|>assistant\n"
    prompts = [((0, i), {"input_ids": agent.tokens(question.format(i))}) for i in range(args.prompts)]
    admitter.feed(prompts, end_of=0)
    step, trained = 0, 0
    while admitter.state.fresh or admitter.state.waiting:
        begun, kept = time.perf_counter(), []
        agent.calls, agent.seconds = 0, 0.0
        for event in engine.rollout(admitter, sampling, version=step, environment=agent, environment_seconds=30):
            if isinstance(event, Group):
                trained += 1
                kept += [sample.output for sample in event.list_kept()]  # train on the tokens of output.make_mask()
        turns = [1 + sum(span.version is None for span in output.spans) for output in kept]
        lengths = [output.tokens for output in kept]
        print(
            f"round {step}, {event.kind}: {time.perf_counter() - begun:.2f} s, {len(kept)} samples of {min(turns)} to "
            f"{max(turns)} turns and {min(lengths)} to {max(lengths)} tokens; the tool answered {agent.calls} times in "
            f"{agent.seconds:.2f} s; threw {event.thrown} tokens away, {len(event.ages)} prompts wait"
        )
        step += 1
    print(f"{trained} of {args.prompts} prompts trained, each once")
    engine.shutdown()
    server.shutdown()


if __name__ == "__main__":
    main()
