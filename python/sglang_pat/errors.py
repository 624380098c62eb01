"""What errors say to a user."""

from __future__ import annotations


def format_one_line(error: BaseException) -> str:
    """What an error says, without line breaks; its type's name if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


class Unsupported(ValueError):
    """The model turned out at start to be one that cannot cross a switch; one line with why and what to do."""
