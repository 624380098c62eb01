"""Checks that need no import of SGLang: a wrong path or port is refused in a moment."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_pat.memory.estimate import read_config
from sglang_pat.predict.profile import load

GRPC_OFFSET, MAX_PORT = 10_000, 65_535

FUNCTIONS = (
    "sglang.srt.managers.scheduler.run_scheduler_process",
    "sglang.srt.managers.detokenizer_manager.run_detokenizer_process",
)
"""Of SGLang's own launchers, of whose processes ours stand in the place."""


def check_command_line(argv: Sequence[str]) -> None:
    """Raise ``ValueError`` for a model, a profile or a port that cannot be used; everything else is for later.

    A configuration file may say otherwise: with ``--config`` nothing is looked at here.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--pat-profile")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30_000)
    if {"--config", "-h", "--help"} & {arg.split("=", 1)[0] for arg in argv}:
        return
    try:
        found, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return
    if found.model_path is not None:
        check_model_path(found.model_path)
    if found.pat_profile is not None:
        load(found.pat_profile, complete=True)
    check_port(found.host, found.port)


def check_model_path(model: str) -> None:
    """Raise ``ValueError`` for a folder that is none, or whose config.json cannot be read.

    What may be the name of a repository is left to SGLang, unless nothing can be downloaded.
    """
    looks_local = model.startswith(("/", ".", "~")) or model.count("/") > 1
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if Path(model).exists() or ("://" not in model and (looks_local or offline)):
        read_config(model)


def check_port(host: str, port: int) -> None:
    """Raise ``ValueError`` unless a server can listen there."""
    check_second_port(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror}; choose another") from None


def check_second_port(port: int) -> None:
    """Raise ``ValueError`` for a port that leaves no room for SGLang's second."""
    if port < 0 or ("SGLANG_GRPC_PORT" not in os.environ and port + GRPC_OFFSET > MAX_PORT):
        raise ValueError(
            f"--port {port}: SGLang also reserves the port 10,000 above, and the highest is {MAX_PORT:,}; "
            f"choose one up to {MAX_PORT - GRPC_OFFSET}"
        )


def refuse_function(name: str, given: Callable) -> None:
    """Raise ``ValueError`` for a function that would not be called: whoever gave it counts on what it does."""
    # By its name, as plug-ins of SGLang's wrap its own.
    found = f"{getattr(given, '__module__', '?')}.{getattr(given, '__qualname__', given)}"
    if found not in FUNCTIONS:
        raise ValueError(
            f"{name} is {found}: an adaptive engine starts its processes itself, and would not call it; launch SGLang "
            "without it, or without SGLANG_PAT"
        )
