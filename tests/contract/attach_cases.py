"""Run by test_attach.py in a process of its own, since it patches SGLang: prints what became of stock arguments."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from sglang_pat.cpu import shim

shim.ensure()

from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: E402

from sglang_pat.config import VARIABLE  # noqa: E402
from sglang_pat.host import adapter  # noqa: E402
from sglang_pat.plugin import plugin  # noqa: E402
from sglang_pat.server.attach import attach  # noqa: E402


def main(model: str) -> None:
    def stock(**given):
        return ServerArgs(
            model_path=model, device="cpu", attention_backend="torch_native", max_total_tokens=4000, **given
        )

    def told(given: ServerArgs) -> dict:
        args = adapter.engine.find_adaptive(given)
        return {
            "adaptive": args is not None and args.adaptive_tp,
            "tp": args.tp_size,
            "dp": args.dp_size,
            "base": str(args.spec.config.base),
            "policy": args.spec.config.policy,
            "requests": args.max_running_requests,
            "chunk": args.chunked_prefill_size,
            "stream": args.stream_interval,
        }

    def refusal(**given) -> str:
        try:
            stock(**given).check_server_args()
        except ValueError as error:
            return str(error)
        return ""

    early = stock(tp_size=4, max_running_requests=7)
    attach({"base_tp": 2, "policy": "manual"}, "here")
    early.check_server_args()
    late = stock(tp_size=4, max_running_requests=7)
    late.stream_interval = 3  # whoever made it may change it later
    late.check_server_args()
    again = dict(vars(late))
    late.check_server_args()
    found = {
        "early": told(early),
        "late": told(late),
        "again": again == vars(late),
        "sockets": dataclasses.asdict(PortArgs.init_new(late)),
        "base_tp": refusal(tp_size=3),
        "flag": refusal(tp_size=4, quantization="fp8"),
    }
    os.environ[VARIABLE] = "base_tp=4"
    plugin()
    kept = stock(tp_size=4)
    kept.check_server_args()
    found["kept"] = told(kept)
    attach({}, "here")
    replicas = stock(tp_size=1, dp_size=4)
    replicas.check_server_args()
    found["replicas"] = told(replicas)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
