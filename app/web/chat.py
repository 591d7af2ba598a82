"""Conversation with the model of a run, in a child process that stays for the next question."""

import asyncio
import json
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


class Chat:
    """Messages so far. `words` start a process that answers each line of JSON by one; it is started by a question and
    ended `idle_seconds` after the last answer.
    """

    def __init__(self, words: Sequence[str], idle_seconds: float = 600) -> None:
        self.messages: list[dict[str, str]] = []
        self.problem = ""  # why there was no answer to the last question
        self._words, self._idle_seconds = words, idle_seconds
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._timer: asyncio.Task[None] | None = None

    async def ask(self, question: str) -> None:
        """Add the question with its answer, or set `problem`."""
        async with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            asked = [*self.messages, {"role": "user", "content": question}]
            found = await self._answer({"messages": asked})
            self.problem = found.get("error", "")
            if not self.problem:
                self.messages += [asked[-1], {"role": "assistant", "content": found["answer"]}]
            self._timer = asyncio.create_task(self._end_later())

    async def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or await asyncio.create_subprocess_exec(
            *self._words, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True, limit=2**24
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):  # it has ended, and its output says why
            process.stdin.write(json.dumps(row).encode() + b"\n")
            await process.stdin.drain()
        printed = b""
        async for line in process.stdout:
            if line.startswith(b"{"):
                return dict(json.loads(line))
            printed += line  # a note or a refusal
        await self.end()
        return {"error": printed.decode(errors="replace") or f"The process ended with code {process.returncode}."}

    async def _end_later(self) -> None:
        await asyncio.sleep(self._idle_seconds)
        await self.end()

    async def end(self) -> None:
        """End the process, which has nothing to save; the messages stay."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
