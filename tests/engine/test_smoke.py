"""The thinnest slice: a switch in the middle of a generation changes no token."""

from __future__ import annotations

from .streams import body, through, tokens


def test_switch_up_and_down(server):
    bodies = [body(i, 120) for i in range(4)]
    answers, records = through(server, bodies, {20: 2, 60: 1, 90: 2})
    assert tokens(answers) == tokens(server.generate(bodies))
    # The prompt, and one token more for each step.
    assert [(r["requests"], r["tokens"]) for r in records] == [(4, 4 * (20 + step)) for step in (20, 60, 90)]
    # The prefill gives the first token, each step one more.
    for answer in answers:
        assert answer["meta_info"]["tp_from_token"] == [[0, 1], [21, 2], [61, 1], [91, 2]]
