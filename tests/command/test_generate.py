"""Asking a finished run: one prompt, a file of them, a conversation, and the base beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command.test_resume import SMALL
from tests.runs import Zygote


@pytest.fixture(scope="module")
def run(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    few = (*SMALL, "training.max_steps=4", "optimizer.lr=2e-2", "eval.every=0", "checkpoint.every=0")
    ended = zygote.run(folder, *few, f"output_dir={folder / 'run'}")
    assert ended.code == 0, ended.stderr
    return folder / "run"


def test_a_file_of_prompts_is_answered_in_its_order(zygote: Zygote, run: Path, tmp_path: Path) -> None:
    prompts = ["Name the opposite of new.", "Hi", "What is two and three?"]
    (tmp_path / "asked.txt").write_text("\n".join(prompts))
    common = (f"run={run}", "max_new_tokens=4")
    ended = zygote.run(tmp_path, *common, "prompts=asked.txt", "batch=2", module="app.generate")
    assert (ended.code, ended.stderr) == (0, "")
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == prompts
    alone = zygote.run(tmp_path, *common, f"prompt={prompts[0]}", module="app.generate")
    assert alone.stdout == f"{rows[0]['answer']}\n"
    written = zygote.run(
        tmp_path, *common, "prompts=asked.txt", "output=said/answers.jsonl", module="app.generate"
    )
    assert written.code == 2
    assert "said" in written.stderr
    written = zygote.run(
        tmp_path, *common, "prompts=asked.txt", "output=answers.jsonl", module="app.generate"
    )
    assert (written.code, written.stdout) == (0, "")
    assert [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()] == rows


def test_any_folder_can_be_asked_and_the_base_is_the_run_without_its_adapter(
    zygote: Zygote, run: Path, tmp_path: Path
) -> None:
    asked = ("prompt=Name the opposite of new.", "max_new_tokens=6")
    base = zygote.run(tmp_path, f"model={run / 'base'}", *asked, module="app.generate")
    without = zygote.run(tmp_path, f"run={run}", "adapter=false", *asked, module="app.generate")
    tuned = zygote.run(tmp_path, f"run={run}", *asked, module="app.generate")
    assert (base.code, base.stderr) == (0, "")
    assert base.stdout == without.stdout != tuned.stdout
    adapter = zygote.run(tmp_path, f"model={run / 'final'}", *asked, module="app.generate")
    assert adapter.code == 2
    assert "this is an adapter without its base. Give run=DIR" in adapter.stderr


def test_a_conversation_over_a_pipe(run: Path, tmp_path: Path, app_env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.generate", f"run={run}", "max_new_tokens=3"],
        input="Hi\n/undo\nHi\n/quit\nnever asked\n",
        env=app_env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *answers = done.stdout.splitlines()
    assert first.startswith("/new begins anew")
    assert len(answers) == 2
    assert answers[0] == answers[1]
