"""Commands that the program prints, as its user would type them."""

import sys

import pytest

from app import program


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(program.TYPED, "")
    monkeypatch.setenv(program.STARTED_AS, "finetune")
    repeated = [
        "recipe=orpo",
        "task=tokens",
        "model.path=a b",
        "dataset.max_length=120",
        "dataset.eval_path=held.jsonl",
    ]
    others = ["dataset=x", "dataset.columns.text=y", "hardware=h100", "output_dir=runs/a", "resume=auto"]
    program.remember_settings(["data", "memory", "-m", *others, *repeated])


@pytest.mark.parametrize(
    ("printed", "completed"),
    [
        (
            "type: finetune check data recipe=dpo dataset=preference 'dataset.path=c d'\n    Or stop",
            "type: finetune check data recipe=orpo task=tokens 'model.path=a b' dataset.max_length=120"
            " dataset.eval_path=held.jsonl dataset=preference 'dataset.path=c d'\n    Or stop",
        ),
        (
            "finetune check data task=classification dataset=text model.path=z dataset.max_length=9 and more=x",
            "finetune check data recipe=orpo dataset.eval_path=held.jsonl task=classification dataset=text"
            " model.path=z dataset.max_length=9 and more=x",
        ),
        ("finetune check data looks through the data", "finetune check data looks through the data"),
        ("finetune check memory recipe=lora", "finetune check memory recipe=lora"),
    ],
)
@pytest.mark.usefixtures("typed")
def test_printed_check_of_data_repeats_typed_settings(printed: str, completed: str) -> None:
    assert program.as_started(printed) == completed
    assert program.as_started(completed) == completed, "messages may be completed twice"


@pytest.mark.parametrize(
    ("started_as", "command"),
    [(None, "python -m app.train"), ("./finetune", "./finetune train"), ("python -m app", "python -m app train")],
)
def test_printed_command_is_spelled_as_started(
    started_as: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: sys.executable)
    monkeypatch.delenv(program.STARTED_AS, raising=False)
    if started_as:
        monkeypatch.setenv(program.STARTED_AS, started_as)
    text = "finetune train seed=1 output_dir=/x/finetune train.txt; finetune it"
    assert program.as_started(text) == f"{command} seed=1 output_dir=/x/finetune train.txt; finetune it"


def test_resume_command_replaces_the_output_folder() -> None:
    typed = ["dataset.path=a b", "output_dir=x", "to=y", "resume=runs/y", "+seed=1"]
    assert (
        program.resume_command(typed, "runs/z")
        == "finetune train 'dataset.path=a b' +seed=1 output_dir=runs/z resume=auto"
    )
