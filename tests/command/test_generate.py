"""Asking a finished run: one prompt, a file of them, the base beside it; a conversation with history and commands."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.data.rows import Message
from app.errors import PromptTooLong
from app.generate import CHAT_HELP, ChatSession
from tests.harness.runs import FinishedRuns, Zygote


def test_generate_answers_a_file_in_order(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    prompts = ["Name the opposite of new.", "Hi", "What is two and three?"]
    (tmp_path / "asked.txt").write_text("\n".join(prompts))
    common = (f"run={finished()}", "max_new_tokens=4")
    ended = zygote.finish(tmp_path, *common, "prompts=asked.txt", "batch=2", module="app.generate")
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == prompts
    alone = zygote.run(tmp_path, *common, f"prompt={prompts[0]}", module="app.generate")
    assert alone.stdout == f"{rows[0]['answer']}\n"
    written = zygote.run(
        tmp_path, *common, "prompts=asked.txt", "output=said/answers.jsonl", module="app.generate", code=2
    )
    assert "said" in written.stderr
    written = zygote.run(tmp_path, *common, "prompts=asked.txt", "output=answers.jsonl", module="app.generate")
    assert (written.code, written.stdout) == (0, "")
    assert written.stderr == "1 of 3 answered\n2 of 3 answered\n3 of 3 answered\nanswers.jsonl\n"
    assert [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()] == rows


def test_generate_base_equals_run_without_adapter(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    asked = ("prompt=Name the opposite of new.", "max_new_tokens=6")
    base = zygote.run(tmp_path, f"model={finished() / 'base'}", *asked, module="app.generate")
    without = zygote.run(tmp_path, f"run={finished()}", "adapter=false", *asked, module="app.generate")
    tuned = zygote.run(tmp_path, f"run={finished()}", *asked, module="app.generate")
    assert (base.code, base.stderr) == (0, "")
    assert base.stdout == without.stdout != tuned.stdout
    adapter = zygote.run(tmp_path, f"model={finished() / 'final'}", *asked, module="app.generate", code=2)
    assert "this is a PEFT adapter without its base. Use run=DIR" in adapter.stderr


def test_generate_rows_from_standard_input_stream_on_request_until_sigint(finished: FinishedRuns) -> None:
    words = (f"run={finished()}", "adapter=false", "prompts=-", "max_new_tokens=6")
    command = [sys.executable, "-m", "app.generate", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        to, answers = process.stdin, process.stdout
        assert to is not None
        assert answers is not None

        def send(**row: Any) -> None:
            to.write(json.dumps({"prompt": "Name the opposite of new.", **row}) + "\n")
            to.flush()

        def read() -> dict[str, Any]:
            return dict(json.loads(answers.readline()))

        send()
        send(stream=True)
        whole, first = read(), read()
        assert whole.keys() == {"messages", "answer"}
        pieces = []
        while "piece" in (line := read()):
            pieces.append(line["piece"])
        assert (first, line) == ({"piece": ""}, whole)
        assert len(pieces) > 1
        assert "".join(pieces).strip() == whole["answer"]
        send(stream=True, temperature=50, max_new_tokens=400)
        for _ in range(4):
            assert "piece" in read()
        process.send_signal(signal.SIGINT)
        while "piece" in (line := read()):
            pass
        assert line["stopped"] is True
        assert line["answer"]
        send(temperature=-1, max_new_tokens="few")
        assert read() == {
            "error": "error: 2 problems\n  1. max_new_tokens=few: expected a whole number.\n"
            "  2. temperature=-1.0 must be at least 0."
        }
        send()
        assert read() == whole, "options of a row are for that row"
    assert process.returncode == 0


def talk(*lines: str, system: str | None = None) -> tuple[list[list[Message]], str, ChatSession]:
    asked: list[list[Message]] = []
    shown: list[str] = []

    def answer(messages: list[Message], write: Callable[[str], None]) -> str:
        asked.append(messages)
        if messages[-1]["content"] == "stop":
            write("half an")
            raise KeyboardInterrupt
        if messages[-1]["content"] == "too long":
            raise PromptTooLong("prompt has 900 tokens")
        write(f"answer {len(asked)}")
        return f"answer {len(asked)}"

    conversation = ChatSession(answer, shown.append, system)
    conversation.run(lines)
    return asked, "".join(shown), conversation


def contents(messages: list[Message]) -> list[str]:
    return [f"{m['role']}: {m['content']}" for m in messages]


def test_conversation_sends_its_history() -> None:
    asked, shown, _ = talk("one\n", "  \n", "two\n", system="Be kind.")
    assert contents(asked[1]) == ["system: Be kind.", "user: one", "assistant: answer 1", "user: two"]
    assert shown == f"{CHAT_HELP}\nanswer 1\nanswer 2\n"


def test_conversation_commands_change_the_history() -> None:
    asked, shown, _ = talk("one", "/undo", "two", "/system Be brief.", "three", "/nwe", "/new", "four", "/quit", "five")
    assert contents(asked[1]) == ["user: two"]
    assert contents(asked[2]) == ["system: Be brief.", "user: three"]
    assert contents(asked[3]) == ["system: Be brief.", "user: four"]
    assert len(asked) == 4
    assert "unknown command /nwe." in shown


def test_conversation_forgets_a_stopped_answer() -> None:
    asked, shown, conversation = talk("one", "stop", "two")
    assert contents(asked[2]) == ["user: one", "assistant: answer 1", "user: two"]
    assert "half an\n(stopped; this turn was removed)\n" in shown
    assert len(conversation.messages) == 4


def test_conversation_goes_on_after_a_long_prompt() -> None:
    asked, shown, _ = talk("one", "too long", "two")
    assert contents(asked[2]) == ["user: one", "assistant: answer 1", "user: two"]
    assert "prompt has 900 tokens\n(this turn was removed; /new starts a new conversation)\n" in shown
