"""SGLang's flags that ``tests/contract/flags.py`` says work: turned on together, on servers that switch under load."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from safetensors.torch import load_file

from sglang_pat.host.adapter import FOLDER
from sglang_pat.testing.ports import find_free_port
from sglang_pat.testing.server import Server
from sglang_pat.testing.tokenizer import SPECIAL_TOKENS, STOP_ID

from .streams import body, through, tokens
from .weight_updates import check_success, serialize

SCHEDULING = (
    "--schedule-policy lpm --schedule-conservativeness 0.7 --radix-eviction-policy lfu --max-prefill-tokens 512 "
    "--prefill-max-requests 2 --max-queued-requests 64 --chunked-prefill-size 64 --allow-auto-truncate "
    "--context-length 1024 --stream-interval 3 --incremental-streaming-output --batch-notify-size 4 "
    "--stream-response-default-include-usage --enable-return-hidden-states --enable-custom-logit-processor "
    "--enable-fp32-lm-head --sampling-defaults openai --enable-cache-report "
    "--enable-tokenizer-batch-encode --constrained-json-disable-any-whitespace --sampling-backend pytorch "
    "--attention-backend torch_native --grammar-backend llguidance --device cpu --disable-cuda-graph --sleep-on-idle "
    "--abort-on-priority-when-disabled"
)
if FOLDER == "v0_5_12":
    SCHEDULING += " --enable-nan-detection"
SERVING = (
    "--host 127.0.0.1 --served-model-name tiny --weight-version v7 --reasoning-parser qwen3 --tool-call-parser qwen25 "
    "--strip-thinking-cache --fastapi-root-path /api --load-format safetensors --trust-remote-code "
    "--tokenizer-mode auto --tokenizer-backend huggingface --model-config-parser hf --weight-loader-disable-mmap "
    "--weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads 2 "
    "--weight-loader-drop-cache-after-load --watchdog-timeout 200 --soft-watchdog-timeout 100 --dist-timeout 300"
)
LOGS = (
    "--log-level info --log-level-http warning --log-requests --log-requests-level 1 --log-requests-format json "
    "--log-requests-target stdout --uvicorn-access-log-exclude-prefixes /metrics --show-time-cost "
    "--decode-log-interval 5 --enable-request-time-stats-logging --gc-warning-threshold-secs 10 "
    "--gc-threshold 700 10 10 --enable-metrics --enable-metrics-for-all-schedulers --enable-mfu-metrics "
    "--tokenizer-metrics-custom-labels-header x-labels --tokenizer-metrics-allowed-custom-labels team "
    "--bucket-time-to-first-token 0.1 1 --bucket-inter-token-latency 0.01 0.1 --bucket-e2e-request-latency 1 10 "
    "--prompt-tokens-buckets default --generation-tokens-buckets default --export-metrics-to-file"
)
PLACE = "model_runner" if FOLDER == "v0_5_12" else "model_runner_components.weight_updater"
LOADER = f"sglang.srt.model_executor.{PLACE}._model_load_weights_direct"
"""Takes a model and named tensors, as a user's function would."""
WORK = [body(i, 60) | {"input_ids": [5 + i, 7 + 3 * i, 9] + list(range(20, 20 + 11 * i))} for i in range(12)]
UP = {10: 2, 20: 1, 30: 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("flags")


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Where the ranks of the two servers meet."""
    return [find_free_port(), find_free_port()]


@pytest.fixture(scope="module")
def checksums(folder, llama):
    from sglang_pat.cpu import shim

    shim.install()
    from sglang.srt.utils.model_file_verifier import generate_checksums

    generate_checksums(source=str(llama), output_path=str(folder / "checksums.json"))
    return folder / "checksums.json"


@pytest.fixture
def bundle(servers, llama, folder, ports, checksums) -> Server:
    """Everything that goes together."""
    (template := folder / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    shutil.copytree(llama, tokenizer := folder / "tokenizer", dirs_exist_ok=True)
    # Reasoning parsers ask for a single token that ends the thinking.
    (words := tokenizer / "tokenizer.json").write_text(words.read_text().replace(SPECIAL_TOKENS[STOP_ID], "</think>"))
    with_values = {
        "--chat-template": template,
        "--tokenizer-path": tokenizer,
        "--download-dir": folder / "downloads",
        "--export-metrics-to-file-dir": folder / "metrics",
        "--crash-dump-folder": folder / "crashes",
        "--model-checksum": checksums,
        "--custom-weight-loader": LOADER,
        "--nccl-port": ports[0],
        "--extra-metric-labels": json.dumps({"job": "flags"}),
        "--preferred-sampling-params": json.dumps({"top_k": 50}),
        "--json-model-override-args": json.dumps({"tie_word_embeddings": False}),
        "--model-loader-extra-config": json.dumps({"enable_multithread_load": False}),
    }
    flags = [*SCHEDULING.split(), *SERVING.split(), *LOGS.split()]
    flags += [str(word) for pair in with_values.items() for word in pair]
    return servers.adaptive(llama, 2, *flags)


def test_bundle_gives_the_same_tokens(bundle):
    want = tokens(bundle.generate(WORK))
    asked = {"return_hidden_states": True, "require_reasoning": True}
    assert tokens(through(bundle, [one | asked for one in WORK], UP)[0]) == want
    assert tokens(bundle.generate(WORK)) == want, "no slot of the tree is another's"


def test_bundle_streams_in_pieces(bundle):
    async def run() -> list[dict]:
        async with bundle.session() as session:
            chunks = []
            async for chunk in bundle.stream(session, WORK[0]):
                chunks.append(chunk)
                if len(chunks) == 4:
                    code, record = await bundle.reconfigure_async(session, 2)
                    assert code == 200, record
            return chunks

    chunks = asyncio.run(run())
    pieces = [chunk["output_ids"] for chunk in chunks]
    assert sum(pieces, []) == tokens(bundle.generate(WORK[:1]))[0]
    assert 1 < len(pieces) <= 60


def test_bundle_answers_chats_and_counts(bundle, folder):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 8, "temperature": 0}
    answers = []
    for tp in (1, 2, 2):
        bundle.reconfigure(tp)
        answers.append(bundle.post("/v1/chat/completions", chat, headers={"x-labels": '{"team": "red"}'}).json())
    first, second, third = answers
    assert first["choices"][0]["message"] == second["choices"][0]["message"] == third["choices"][0]["message"]
    assert first["model"] == "tiny" and first["metadata"]["weight_version"] == "v7"
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    metrics = bundle.get("/metrics").text
    assert 'job="flags"' in metrics and 'team="red"' in metrics
    assert list((folder / "metrics").iterdir())


def test_bundle_refuses_a_priority_in_each_layout(bundle):
    for tp in (1, 2):
        bundle.reconfigure(tp)
        answer = bundle.post("/generate", WORK[0] | {"priority": 3})
        assert answer.status_code == 503 and "Using priority is disabled" in answer.text


def test_bundle_takes_weights_by_a_function_of_the_users(bundle, llama):
    """Which writes into the base shards, so that every layout has them."""
    name = "model.norm.weight"
    norm = load_file(llama / "model.safetensors")[name]
    want = tokens(bundle.generate(WORK))

    def send(tensor) -> None:
        items = [serialize([(name, tensor)]) for _ in range(2)]
        check_success(
            bundle.post("/update_weights_from_tensor", dict(serialized_named_tensors=items, load_format=LOADER))
        )

    send(-norm)
    others = tokens(bundle.generate(WORK))
    assert all(other != one for other, one in zip(others, want, strict=True))
    assert tokens(through(bundle, WORK, UP)[0]) == others
    send(norm)
    assert tokens(bundle.generate(WORK)) == want


def test_without_a_radix_cache_and_with_dummy_weights(servers, llama, ports):
    """Dummy weights are made at the base layout; the others slice them."""
    flags = (
        "--disable-radix-cache --load-format dummy --disable-tokenizer-batch-decode --schedule-policy fcfs "
        "--enable-priority-scheduling --disable-priority-preemption --enable-dynamic-batch-tokenizer "
        "--dynamic-batch-tokenizer-batch-size 4 --dynamic-batch-tokenizer-batch-timeout 0.01"
    )
    pattern = ("--constrained-json-whitespace-pattern", "[ ]?", "--completion-template", "star_coder")
    server = servers.adaptive(llama, 2, *flags.split(), *pattern, "--dist-init-addr", f"127.0.0.1:{ports[1]}")
    texts = [{"text": "a b c " * (1 + i), "priority": i % 3} for i in range(6)]
    texts = [text | {"sampling_params": WORK[0]["sampling_params"]} for text in texts]
    want = tokens(server.generate(texts)) + tokens(server.generate(WORK))
    assert tokens(through(server, [*texts, *WORK], UP)[0]) == want
