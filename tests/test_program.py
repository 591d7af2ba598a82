"""Commands that the program prints, as its user would type them."""

import pytest

from app import program


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(program.TYPED, "")
    monkeypatch.delenv(program.STARTED_AS, raising=False)
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
            "type: python -m app.check data recipe=dpo dataset=preference 'dataset.path=c d'\n    Or stop",
            "type: python -m app.check data recipe=orpo task=tokens 'model.path=a b' dataset.max_length=120"
            " dataset.eval_path=held.jsonl dataset=preference 'dataset.path=c d'\n    Or stop",
        ),
        (
            "python -m app.check data task=classification dataset=text model.path=z dataset.max_length=9 and more=x",
            "python -m app.check data recipe=orpo dataset.eval_path=held.jsonl task=classification dataset=text"
            " model.path=z dataset.max_length=9 and more=x",
        ),
        ("python -m app.check data looks through the data", "python -m app.check data looks through the data"),
        ("python -m app.check memory recipe=lora", "python -m app.check memory recipe=lora"),
    ],
)
@pytest.mark.usefixtures("typed")
def test_printed_check_of_data_repeats_typed_settings(printed: str, completed: str) -> None:
    assert program.as_started(printed) == completed
    assert program.as_started(completed) == completed, "messages may be completed twice"
