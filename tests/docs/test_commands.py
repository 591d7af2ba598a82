"""Commands in README and docs: found where they are, marked correctly, and parsed by the program."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.assets import PREFIX
from app.config.arguments import is_sweep, split_arguments
from app.config.commands import GENERATE, REPORT, check_config
from app.config.finished_run import evaluate_config, export_config, reproduce_config
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.errors import AppError
from app.sweeps.sweep import plan_sweep
from tests.conftest import REPO
from tests.docs.blocks import Command, commands_in, commands_of, documents

TEXT = """# Title

Some `code`, and a list:

- an entry

      that is no block of its own

<!-- needs network: model=llama, git clone -->

    git clone here && cd it
    finetune train recipe=full   # a remark

    finetune train \\
      model=llama seed=1
    # only a remark

Text.

    from peft import PeftModel
    x = 1

<!-- needs gpu -->

```bash
torchrun -m app.train
```

<!-- not a command -->

    a + b

```
printed, not typed
```

```
$ finetune train seed=x
error: seed
  two lines
$ finetune train -m seed=1,2
some lines
$ echo $?
3
```
"""


def test_commands_are_found_with_their_place_needs_and_what_is_printed() -> None:
    assert commands_in(TEXT, "x.md") == [
        Command("x.md:11", "git clone here && cd it", "network"),
        Command("x.md:12", "finetune train recipe=full   # a remark"),
        Command("x.md:14", "finetune train   model=llama seed=1", "network"),
        Command("x.md:26", "torchrun -m app.train", "gpu"),
        Command("x.md:38", "finetune train seed=x", None, 2, "error: seed\n  two lines"),
        Command("x.md:41", "finetune train -m seed=1,2", None, 3, "some lines"),
    ]


TRAINS = re.compile(r"(.*/)?scripts/train|scripts/cluster/\w+\.sh|app\.train|finetune train|app-finetune")
OTHERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "finetune check": check_config,
    "finetune generate": GENERATE.parse,
    "finetune report": REPORT.parse,
    "finetune evaluate": evaluate_config,
    "finetune export": export_config,
    "finetune reproduce": reproduce_config,
}
RUNS = ("first", "mine", "other", "labels")  # that documents speak of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_runs(tmp_path_factory.mktemp("docs"))


def with_runs(place: Path) -> Path:
    """The folder, with what documents speak of."""
    settings = yaml.safe_dump(asdict(compose_run([])))
    for name in RUNS:
        (place / "runs" / name / "final").mkdir(parents=True)
        (place / "runs" / name / "final" / "adapter_config.json").touch()
        (place / "runs" / name / "run.yaml").write_text(settings)
    (place / "chat.jsonl").touch()  # a file that is there is no misspelt choice
    (place / "runs" / "rates").mkdir()
    (place / "runs" / "rates" / "sweep.json").write_text("{}")
    return place


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(REPO)))
def test_the_words_of_every_command_are_right(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    marked = [each for each in commands_of(document) if each.needs and "sweep=" not in each.text]
    wrong = {f"{each.place}: `{each.text}`": wrong_words(each) for each in marked}
    assert {place: why for place, why in wrong.items() if why} == {}


def wrong_words(command: Command) -> str:
    """Why they would be refused, unless the document shows that; or why a command that is marked can be typed."""
    try:
        runs = [run for part in command.text.split("&&") for run in runs_of(part)]
    except AppError as problem:
        report = problem.report()
        return "" if command.printed.strip() == report.strip() else report
    if command.printed.startswith("error: ") and "finetune check memory" not in command.text:
        return "nothing is wrong with it, and the document shows an error"
    if command.needs == "network" and runs and not any(needs_network(run) for run in runs):
        return "it is marked, but its model and its data are here"
    return ""


def needs_network(run: RunConfig) -> bool:
    named = [run.model.path] if run.model.weights == "pretrained" else []
    return any("/" in name and not name.startswith((PREFIX, "/", ".")) for name in [*named, run.dataset.path or ""])


def runs_of(text: str) -> list[RunConfig]:
    """The runs that a command would start, each as it would be checked."""
    text = re.sub(r"\bfinetune (\w+)", r"'finetune \1'", text)  # one word, as finetune train is
    words = [word for word in shlex.split(text, comments=True) if word != "..."]
    for at, word in enumerate(words):
        if word in OTHERS:
            config = OTHERS[word](words[at + 1 :])
            return [config.run] if word == "finetune check" else []
    starts = [n for n, word in enumerate(words) if TRAINS.fullmatch(word)]
    if not starts or words[:2] == ["docker", "build"]:
        return []
    settings = words[starts[-1] + 1 :]
    if not is_sweep(settings):
        return [compose_run(split_arguments(settings)[0])]
    return list(plan_sweep(settings, lambda _run: None).runs)
