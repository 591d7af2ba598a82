"""A conversation at a terminal: what is typed, what is answered, and what both said before."""

from collections.abc import Callable, Iterable
from typing import Any

from app.data.prompts import as_conversation
from app.data.types import Message

HELP = (
    "/new begins anew, /system TEXT sets the system line, /undo takes the last turn back, /quit ends; "
    "Ctrl-C stops an answer"
)


class Conversation:
    """`answer` takes the messages so far and where to write, and returns the whole answer."""

    def __init__(
        self,
        answer: Callable[[list[Message], Callable[[str], None]], str],
        write: Callable[[str], Any],
        system: str | None,
    ) -> None:
        self._answer = answer
        self._write = write
        self._system = system
        self.messages: list[Message] = []

    def hold(self, lines: Iterable[str]) -> None:
        """Until the lines end or say so."""
        self._write(f"{HELP}\n")
        for line in lines:
            if line.strip() in {"/quit", "/exit"}:
                return
            if line.startswith("/"):
                self._command(line.strip())
            elif line.strip():
                self._turn(line.rstrip("\n"))

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/new":
            self.messages = []
        elif word == "/system":
            self._system, self.messages = rest or None, []
        elif word == "/undo":
            self.messages = self.messages[:-2]
        else:
            self._write(f"{word} is no command. {HELP}\n")

    def _turn(self, line: str) -> None:
        said = [*self.messages, {"role": "user", "content": line}]
        opened = [*as_conversation("", self._system)[:-1], *said]
        try:
            answer = self._answer(opened, self._write)
        except KeyboardInterrupt:
            self._write("\n(stopped; this turn is forgotten)\n")
            return
        self._write("\n")
        self.messages = [*said, {"role": "assistant", "content": answer}]
