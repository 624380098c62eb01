"""A profile of two layouts that nobody measured, so that those who predict have something to choose from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from sglang_pat.cpu import shim
from sglang_pat.predict.profile import DecodePoint, Fingerprint, PrefillPoint, Profile, SwitchSample
from sglang_pat.testing.prefork import Prefork, run


def fingerprint(model: Path, prefork: Prefork | None) -> Fingerprint:
    """The fingerprint of an engine with two ranks, as it would be started here."""
    ran = run(prefork, __name__, [str(model)], os.environ, 200)
    assert ran.returncode == 0, ran.stderr
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=Fingerprint)


def main(model: str) -> None:
    print(msgspec.json.encode(read_fingerprint(model)).decode())


def read_fingerprint(model: str) -> Fingerprint:
    """Print it, in a process that may import SGLang."""
    shim.ensure()
    from sglang_pat.host.arguments import make_arguments, make_fingerprint

    args = make_arguments(model_path=model, tp_size=1, dp_size=2, adaptive_tp=True, dtype="float32")
    return make_fingerprint(args, args.read_config(), kv_tokens=4096, max_running=8)


def make_profile(deployment: Fingerprint, tp2_with_16: float = 0.048) -> Profile:
    """A profile by which policies act: tp1 is faster for many requests, tp2 for few; a switch costs 10 ms.

    ``tp2_with_16``: seconds of a step of 16 requests in tp2; in tp1 it takes 0.024.
    """
    seconds = {(1, 1): 0.020, (1, 16): 0.024, (2, 1): 0.010, (2, 16): tp2_with_16}
    decode = [
        DecodePoint(tp=tp, replicas=2 // tp, batch=b, context=c, seconds=s + 1e-7 * b * c, samples=(s,))
        for (tp, b), s in seconds.items()
        for c in (64, 1024)
    ]
    prefill = [
        PrefillPoint(tp=tp, replicas=2 // tp, batch=b, length=n, seconds=1e-4 * b * n / tp, samples=(1e-4,))
        for tp in (1, 2)
        for b in (1, 16)
        for n in (16, 1024)
    ]
    switches = [
        SwitchSample(
            from_tp=a, to_tp=b, requests=n, tokens=200 * n, mode="migrate", moved_bytes=n << 20,
            pause_seconds=0.01, prepare_seconds=0.0,
            phases={"prepare": 0.0, "drain": 0.001, "capsules": 0.004, "plan": 0.002, "kv": 1e-4 * n, "install": 0.002},
        )
        for a, b in ((1, 2), (2, 1))
        for n in (0, 2, 8)
    ]  # fmt: skip
    return Profile(
        fingerprint=deployment, complete=True, decode=tuple(decode), prefill=tuple(prefill), switches=tuple(switches)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
