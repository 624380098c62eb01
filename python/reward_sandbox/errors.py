"""Messages of errors, for a user."""

from __future__ import annotations


def format_one_line(error: BaseException) -> str:
    """The message of an error, without line breaks; the name of its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
