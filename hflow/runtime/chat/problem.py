"""Why a conversation cannot be rendered or learned from; who knows the row makes it a diagnostic."""

from __future__ import annotations


class ChatProblem(Exception):  # noqa: N818  (it is what went wrong, not always an error of the user)
    """`message` is one phrase, `help` what to do about it."""

    def __init__(self, message: str, help: str = ""):
        super().__init__(message)
        self.message = message
        self.help = help
