"""An engine in a framework's own process, as OpenRLHF's actor has it."""

from __future__ import annotations

import json


def test_all_of_the_context_can_be_used_and_a_client_may_go(servers, llama):
    """The model's own context, of which SGLang leaves the last tokens out."""
    context = json.loads((llama / "config.json").read_text())["max_position_embeddings"]
    done = servers.run("tests.engine.inprocess_case", str(llama), str(context))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    refused, *answers = found["answers"]
    assert refused == f"the prompt has {context} tokens, may have {context - 1}: shorten it"
    assert answers == [1, 2, 7, 8] and found["given"] == [2, 4]
    assert f"context_length ({context + 1}) is greater than" in found["too long"]
    assert found["left"] == 0
