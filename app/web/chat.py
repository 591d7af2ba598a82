"""Chat with a finished run, answered by a child process."""

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

OPTIONS = ("system", "temperature", "max_new_tokens")  # fields of the form; empty ones keep the defaults


@dataclass(slots=True)
class Turn:
    """A question, and its answer so far; loading until the process reports that it generates."""

    question: str
    answer: str = ""
    is_loading: bool = True
    is_stopped: bool = False


class Chat:
    """Conversation with a run. `words` is the command of a process that answers JSON lines; it starts with a question
    and ends `idle_seconds` after the last answer.
    """

    def __init__(self, words: Sequence[str], idle_seconds: float = 600) -> None:
        self.messages: list[dict[str, str]] = []
        self.options = dict.fromkeys(OPTIONS, "")
        self.turn: Turn | None = None  # in progress
        self.problem = ""  # error of the last question
        self.unanswered = ""  # the last question, if it has no answer
        self._words, self._idle_seconds = words, idle_seconds
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._timer: asyncio.Task[None] | None = None

    async def ask(self, question: str, options: Mapping[str, str]) -> None:
        """Add the question and its answer, or set `problem`; questions wait for the one before."""
        async with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self.options |= options
            self.turn, self.problem, self.unanswered = Turn(question), "", ""
            try:
                self.problem = await self._answer(self.turn)
                if self.problem or (self.turn.is_stopped and not self.turn.answer):
                    self.unanswered = question
                else:
                    answer = {"role": "assistant", "content": self.turn.answer}
                    self.messages += [{"role": "user", "content": question}, answer]
            except BaseException:
                await self.end()  # its next lines belong to this question
                raise
            finally:
                self.turn = None
            self._timer = asyncio.create_task(self._end_later())

    def _row(self, question: str) -> dict[str, Any]:
        system, *numbers = (self.options[name].strip() for name in OPTIONS)
        start = [{"role": "system", "content": system}] if system else []
        messages = [*start, *self.messages, {"role": "user", "content": question}]
        changes = {name: text for name, text in zip(OPTIONS[1:], numbers, strict=True) if text}
        return {"messages": messages, "stream": True, **changes}

    async def _answer(self, turn: Turn) -> str:
        """Read the answer of a turn; return an error."""
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):  # the process has ended; its output has the reason
            process.stdin.write(json.dumps(self._row(turn.question)).encode() + b"\n")
            await process.stdin.drain()
        printed = b""
        async for line in process.stdout:
            if not line.startswith(b"{"):
                printed += line  # a note or an error
                continue
            reply = json.loads(line)
            turn.is_loading = False
            if "piece" not in reply:
                turn.answer = reply.get("answer", turn.answer)
                return str(reply.get("error", ""))
            turn.answer += reply["piece"]
        await self.end()
        if turn.is_stopped:
            return ""
        return printed.decode(errors="replace") or f"The process ended with code {process.returncode}."

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True, limit=2**24
            )
        return self._process

    async def stop(self) -> None:
        """End the answer in progress, and keep its beginning; a process that is still loading is ended."""
        if self.turn is None:
            return
        self.turn.is_stopped = True
        if self.turn.is_loading:
            await self.end()
        elif self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)

    async def clear(self) -> None:
        """Start a new conversation."""
        await self.stop()
        async with self._lock:
            self.messages.clear()
            self.problem = self.unanswered = ""

    async def _end_later(self) -> None:
        await asyncio.sleep(self._idle_seconds)
        await self.end()

    async def end(self) -> None:
        """End the process, which has nothing to save, and keep the messages."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
