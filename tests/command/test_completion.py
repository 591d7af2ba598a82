"""Completion scripts in real shells, and their words against what the program accepts."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.completion import FILE_KEYS, SHELLS, script, words_of
from app.config.overrides import partition_overrides
from app.program import COMMANDS

SECONDS = 30
# typed text: candidates for its last word
TYPED = {
    "tr": {"train"},
    "train optim": {"optimizer=", "optimizer."},
    "train optimizer.l": {"optimizer.lr="},
    "train optimizer=paged": {"optimizer=paged_adamw_8bit", "optimizer=paged_adamw_32bit"},
    "train seed=1 dry_run=": {"dry_run=true", "dry_run=false"},
    "train eval.objective=macro_f": {"eval.objective=macro_f1"},
    "train batching.tokens=": {"batching.tokens=auto"},
    "train dataset.path=da": {"dataset.path=data/"},
    "train dataset=data/ch": {"dataset=data/chat.jsonl"},
    "train dataset=alp": {"dataset=alpaca"},
    "train from=mi": {"from=mine.yaml"},
    "check mem": {"memory"},
    "check hardware=rtx509": {"hardware=rtx5090"},
    "evaluate weights=b": {"weights=base", "weights=both"},
    "export kind=gg": {"kind=gguf"},
    "export run=da": {"run=data/"},
    "convert mi": {"mine.yaml"},
    "completion f": {"fish"},
    "help repr": {"reproduce"},
    "generate adapter=": {"adapter=true", "adapter=false"},
    "train no_such_key=": set(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.jsonl").touch()
    (tmp_path / "mine.yaml").touch()
    for shell in SHELLS:
        (tmp_path / f"completion.{shell}").write_text(script(shell))
    return tmp_path


def requires(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.mark.parametrize("name", COMMANDS)
def test_completion_has_words_of_every_command(name: str) -> None:
    words = words_of(name)
    assert "--help" in words
    assert len({*words}) == len(words), "a key that an option and a setting share would be offered twice"
    assert not any(sign in word for word in words for sign in "'\"\\$`\n")


def test_completion_file_keys_are_keys_of_a_command() -> None:
    assert {word.partition("=")[0] for name in COMMANDS for word in words_of(name)} >= FILE_KEYS


def test_completion_offers_only_words_that_the_program_accepts() -> None:
    lines = [line.partition("=") for line in words_of("train") if "=" in line]
    values = {key: words.split() or ["1"] for key, _, words in lines if key not in ("sweep", "from")}
    typed = [f"{key}={value}" for key, words in values.items() for value in words if value != "/"]
    assert len(typed) > 300
    assert partition_overrides(typed)[1] == []


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_command_prints_the_script(shell: str) -> None:
    command = [sys.executable, "-m", "app", "completion", shell]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == script(shell)


def test_completion_unknown_shell_names_the_shells() -> None:
    command = [sys.executable, "-m", "app", "completion", "csh"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "shell=csh: expected one of bash, zsh, fish." in refused.stderr


@requires("bash")
def test_completion_bash_offers_words_without_starting_a_program(folder: Path) -> None:
    shown = {}
    for text in TYPED:
        line = f"finetune {text}"
        words = line.split(" ")
        code = (
            f"source completion.bash; COMP_LINE='{line}' COMP_POINT={len(line)} COMP_CWORD={len(words) - 1}; "
            f"COMP_WORDS=({line}); _finetune; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
        printed = subprocess.run(
            [str(shutil.which("bash")), "--norc", "-c", code],
            cwd=folder, env={"PATH": "", "HOME": str(folder)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert printed.stderr == ""
        before = words[-1].rpartition("=")[0]  # readline keeps it
        shown[text] = {f"{before}={word}" if before else word for word in printed.stdout.split()}
        shown[text] = {word + "/" if word.endswith("=data") else word for word in shown[text]}  # as readline does
    assert shown == TYPED


@requires("fish")
def test_completion_fish_offers_words(folder: Path) -> None:
    shown = {}
    for text in TYPED:
        code = f"source completion.fish; complete -C 'finetune {text}'"
        command = ["fish", "--no-config", "-c", code]
        printed = subprocess.run(
            command, cwd=folder, env={**os.environ, "HOME": str(folder)}, capture_output=True, text=True, check=True
        )
        shown[text] = {line.partition("\t")[0] for line in printed.stdout.splitlines()}
    assert shown == TYPED


@pytest.mark.parametrize(
    ("shell", "start", "load"),
    [
        pytest.param("bash", ["--norc", "--noprofile", "-i"], "source completion.bash", marks=requires("bash")),
        pytest.param(
            "zsh", ["-f", "-i"], "autoload -U compinit; compinit -u -D; source completion.zsh", marks=requires("zsh")
        ),
    ],
)
def test_completion_tab_in_an_interactive_shell_completes_the_words(
    shell: str, start: list[str], load: str, folder: Path
) -> None:
    typed = [
        ("finetune tra\trecipe=ql\tdry_r\tt\t", "train recipe=qlora dry_run=true"),
        ("finetune check mem\thardware=rtx509\t", "check memory hardware=rtx5090"),
        ("finetune train dataset.path=da\tch\t", "train dataset.path=data/chat.jsonl"),
        ("finetune train optimizer.l\t1e-4 from=mi\t", "train optimizer.lr=1e-4 from=mine.yaml"),
    ]
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "> ", "HOME": str(folder)}
    process = subprocess.Popen(
        [shell, *start], cwd=folder, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
    )
    try:
        _type(terminal, f'{load}; finetune() {{ echo "<$*>"; }}; finetune is loaded\r', "<is loaded>")
        for text, line in typed:
            _type(terminal, f"{text}\r", f"<{line}>")
    finally:
        process.kill()
        process.wait()
        os.close(end)
        os.close(terminal)


def _type(terminal: int, text: str, shown: str) -> None:
    """Type the text, and wait until the shell has shown the other text."""
    os.write(terminal, text.encode())
    seen, end = "", time.monotonic() + SECONDS
    while shown not in seen.replace("\a", ""):
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
