"""SGLang's own launcher, for a plain engine."""

from __future__ import annotations

from typing import Any

from sglang.srt import server_args

from sglang_pat.errors import format_one_line
from sglang_pat.host.assign import assign


def refuse_in_one_line(refusal: type[ValueError]) -> None:
    """Have SGLang's launcher raise ``refusal``, with one line, for arguments that it does not take."""
    prepare = server_args.prepare_server_args

    def prepare_or_refuse(argv: list[str]) -> Any:
        try:
            return prepare(argv)
        except Exception as error:
            raise refusal(format_one_line(error)) from error

    assign(server_args, prepare_server_args=prepare_or_refuse)  # the launcher takes it from its module
