"""The chat of the board, with a small program in place of the model."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from app.web.board import Board
from app.web.chat import Chat
from tests.pages.folders import lines_of, made_run

PROGRAM = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
for line in sys.stdin:
    row = json.loads(line)
    messages, options = row["messages"], [row.get(key) for key in ("stream", "temperature")]
    question = messages[-1]["content"]
    print("a note")
    if question == "end": sys.exit("it ended")
    if question == "load": time.sleep(60)
    say = lambda **values: print(json.dumps(values), flush=True)
    def after(name):  # a file, in the folder that a question names
        while question.startswith("/") and not os.path.exists(f"{question}/{name}"): time.sleep(0.02)
    after("loaded")
    say(piece="")
    try:
        if question == "slow" or question.startswith("/"):
            after("one")
            say(piece="<b>one")
            after("two")
            say(piece=" two")
            time.sleep(60)
        say(answer=f"{os.getpid()} {len(messages)} {options}")
    except KeyboardInterrupt:
        say(answer="<b>one two", stopped=True)
"""
WORDS = [sys.executable, "-c", PROGRAM]


def contents(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.messages]


async def has_answer(chat: Chat) -> bool:
    return chat.turn is not None and chat.turn.answer != ""


async def is_gone(pid: str) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 20
    while not await reached():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_chat_keeps_its_process_until_idle() -> None:
    async def talk() -> None:
        chat = Chat(WORDS, idle_seconds=0.2)
        await chat.ask("one", {})
        await chat.ask("two", {"system": "Be brief.", "temperature": "0.5"})
        pid, *_ = chat.messages[1]["content"].split()
        assert contents(chat) == ["one", f"{pid} 1 [True, None]", "two", f"{pid} 4 [True, '0.5']"]
        assert Path(f"/proc/{pid}").exists()
        await until(lambda: is_gone(pid))
        await chat.ask("end", {})
        assert chat.problem.split("\n")[:2] == ["a note", "it ended"]
        assert (len(chat.messages), chat.unanswered) == (4, "end"), "an unanswered question is no turn"
        await chat.ask("three", {})
        assert not chat.messages[-1]["content"].startswith(pid)
        assert chat.unanswered == ""
        await chat.end()

    asyncio.run(talk())


def test_chat_stopped_while_loading_keeps_question_and_answers_next_one() -> None:
    async def talk() -> None:
        chat = Chat(WORDS)
        loading, waiting = (asyncio.create_task(chat.ask(text, {})) for text in ("load", "next"))
        await asyncio.sleep(0.1)
        assert chat.turn is not None
        assert (chat.turn.question, chat.turn.is_loading) == ("load", True)
        await chat.stop()
        await loading
        await waiting
        assert chat.messages[0]["content"] == "next"
        assert (len(chat.messages), chat.problem) == (2, "")
        await chat.end()

    asyncio.run(talk())


def test_board_shows_pieces_of_an_answer_until_it_is_stopped(tmp_path: Path) -> None:
    async def talk() -> None:
        made_run(tmp_path / "mine")
        (tmp_path / "mine" / "final").mkdir()
        board = Board(tmp_path)
        chat = board._chats["mine"] = Chat(WORDS)
        transport = httpx.ASGITransport(app=board.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://board", follow_redirects=True) as client:

            async def shows(text: str) -> bool:
                return text in (await client.get("/run/mine/chat")).text

            asked = asyncio.create_task(client.post("/run/mine/ask", data={"question": str(tmp_path)}))
            await until(lambda: shows("Loading the model ..."))
            (tmp_path / "loaded").touch()
            (tmp_path / "one").touch()
            await until(lambda: shows("&lt;b&gt;one</div>"))
            assert await shows('data-busy="/run/mine/chat"')
            (tmp_path / "two").touch()
            await until(lambda: shows("&lt;b&gt;one two</div>"))
            assert not asked.done(), "the form waits for the whole answer"
            await client.post("/run/mine/ask", data={"stop": "1", "question": "a draft"})
            page = (await asked).text
            assert "&lt;b&gt;one two</div>" in page
            assert "data-busy" not in page
            assert contents(chat) == [str(tmp_path), "<b>one two"]
            await client.post("/run/mine/ask", data={"new": "1"})
            assert chat.messages == []
        await chat.end()

    asyncio.run(talk())


def test_chat_cancelled_during_an_answer_answers_the_next_question() -> None:
    async def talk() -> None:
        chat = Chat(WORDS)
        asked = asyncio.create_task(chat.ask("slow", {}))
        await until(lambda: has_answer(chat))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await chat.ask("next", {})
        assert contents(chat)[0] == "next"
        assert "<b>" not in contents(chat)[1]
        await chat.end()

    asyncio.run(talk())


def test_new_conversation_forgets_the_answer_in_progress() -> None:
    async def talk() -> None:
        chat = Chat(WORDS)
        asked = asyncio.create_task(chat.ask("slow", {}))
        await until(lambda: has_answer(chat))
        await chat.clear()
        await asked
        assert chat.messages == []
        await chat.end()

    asyncio.run(talk())


def test_run_page_escapes_texts_of_its_files(tmp_path: Path) -> None:
    async def read() -> str:
        transport = httpx.ASGITransport(app=Board(tmp_path).application())
        async with httpx.AsyncClient(transport=transport, base_url="http://board") as client:
            return (await client.get("/run/mine")).text

    bad = "<img src=x onerror=alert(1)>"
    sample = {"step": 2, "prompt": bad, "expected": bad, "answer": bad}
    result = {"status": "failed", "error": f"error: {bad}"}
    folder = made_run(tmp_path / "mine", lines_of([3.0, 2.0]), result=result, samples=[sample])
    (folder / "run.yaml").write_text(f"model:\n  path: {bad}\n")
    (folder / "log.txt").write_text(f"2026-01-02 03:04:05+00:00  {bad}\x1b[2J\n")
    page = asyncio.run(read())
    assert bad not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 6, "model, error, three texts of the sample, log"
    assert "\x1b" not in page
