"""Asking a finished run: one prompt, a file of them, a conversation, and the base beside it."""

import json
from pathlib import Path

from tests.harness.runs import FinishedRuns, Zygote


def test_generate_answers_a_file_in_order(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    prompts = ["Name the opposite of new.", "Hi", "What is two and three?"]
    (tmp_path / "asked.txt").write_text("\n".join(prompts))
    common = (f"run={finished()}", "max_new_tokens=4")
    ended = zygote.run(tmp_path, *common, "prompts=asked.txt", "batch=2", module="app.generate")
    assert (ended.code, ended.stderr) == (0, "")
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == prompts
    alone = zygote.run(tmp_path, *common, f"prompt={prompts[0]}", module="app.generate")
    assert alone.stdout == f"{rows[0]['answer']}\n"
    written = zygote.run(tmp_path, *common, "prompts=asked.txt", "output=said/answers.jsonl", module="app.generate")
    assert written.code == 2
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
    adapter = zygote.run(tmp_path, f"model={finished() / 'final'}", *asked, module="app.generate")
    assert adapter.code == 2
    assert "this is an adapter without its base. Give run=DIR" in adapter.stderr
