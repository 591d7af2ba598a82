"""A run.yaml that others made: what it cannot decide, and what it cannot do to its reader."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.config.commands import GENERATE
from app.config.conf_files import to_yaml
from app.config.finished_run import as_run, evaluate_config, export_config, reproduce_config
from app.config.load import compose_run, read_run
from app.config.schema import RunConfig
from app.errors import CheckpointError, ConfigError
from tests.config.small import data_with

TYPED = "model.trust_remote_code=true"


READERS: dict[str, Any] = {
    "from": lambda run, *more: compose_run([f"varied_from={run}", *more]),
    "evaluate": lambda run, *more: evaluate_config([f"run={run}", *more]),
    "export": lambda run, *more: export_config([f"run={run}", "to=x", "kind=adapter", *more]),
    "reproduce": lambda run, *more: reproduce_config([f"run={run}", *more]),
}


def received(folder: Path, **changes: Any) -> Path:
    (folder / "final").mkdir(parents=True)
    data = data_with({"model.suggest.length": 100, **{key.replace("__", "."): each for key, each in changes.items()}})
    (folder / "run.yaml").write_text(to_yaml(data))
    return folder


@pytest.mark.parametrize("command", READERS)
def test_received_run_trusts_code_only_where_typed(tmp_path: Path, command: str) -> None:
    run = received(tmp_path / "run", model__trust_remote_code=True, cache_dir=str(tmp_path / "kernels"))
    assert read_run(run / "run.yaml").model.trust_remote_code  # for the processes of a launch
    config = READERS[command](str(run))
    assert not config.model.trust_remote_code
    assert config.cache_dir == compose_run([]).cache_dir
    typed = READERS[command](str(run), TYPED, "cache_dir=mine")
    assert (typed.model.trust_remote_code, typed.cache_dir) == (True, "mine")


@pytest.mark.parametrize("command", READERS)
def test_received_run_starts_processes_only_where_typed(tmp_path: Path, command: str) -> None:
    run = received(tmp_path / "run", launch__num_processes=3)
    if command in ("from", "reproduce"):  # the number decides the tokens of a step
        with pytest.raises(ConfigError, match=r"launch.num_processes=3 of the run .* Type launch.num_processes=3"):
            READERS[command](str(run))
        assert READERS[command](str(run), "launch.num_processes=2").launch.num_processes == 2
    else:
        assert READERS[command](str(run)).launch.num_processes == 1


def test_received_run_resumed_in_its_folder_keeps_its_processes(tmp_path: Path) -> None:
    run = received(tmp_path / "run", launch__num_processes=3, launch__threads=5, model__trust_remote_code=True)
    resumed = READERS["from"](str(run), f"output_dir={run}", "resume=auto")
    assert (resumed.launch.num_processes, resumed.launch.threads) == (3, 5)
    assert not resumed.model.trust_remote_code
    with pytest.raises(ConfigError, match=r"launch\.num_processes=3"):
        READERS["from"](str(run), "output_dir=elsewhere", "resume=auto")


def test_generate_learns_to_trust_code() -> None:
    assert not GENERATE.parse(["run=r"]).trust_remote_code
    assert GENERATE.parse(["run=r", TYPED]).trust_remote_code


NAMES = ["${seed}", "${oc.env:HOME}", "\\${seed}", "\\\\${seed}", "${", "$${a}", "???", "\\", "a\\${b}c\\"]


@pytest.mark.parametrize("command", READERS)
def test_received_run_has_references_as_text(tmp_path: Path, command: str) -> None:
    run = received(tmp_path / "run", model__licence_page="https://x/${oc.env:HOME}", adapter__targets=NAMES)
    config: RunConfig = READERS[command](str(run))
    assert config.model.licence_page == "https://x/${oc.env:HOME}"
    assert config.adapter.targets == NAMES
    (run / "run.yaml").write_text(to_yaml(asdict(as_run(config))))
    assert read_run(run / "run.yaml").adapter.targets == NAMES
    typed: RunConfig = compose_run([f"varied_from={run}", "model.licence_page=https://x/${seed}"])
    assert typed.model.licence_page == "https://x/0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("k0: &k0 [x]\n" + "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 9)), "alias"),
        ("&a [*a]", "alias"),
        ("seed: " + "[" * 5_000, "nested too deep"),
        ("seed: " + "{a: " * 5_000, "nested too deep"),
        ("# " + "x" * (2 << 20), "larger than 1 MB"),
        ("seed: " + "9" * 5_000, "cannot be read"),
        ("seed: !!python/object/apply:os.mkdir [made]", "constructor"),
        ("seed: !!timestamp 9999-99-99", "cannot be read"),
        ("? {a: 1}\n: 2", "unhashable"),
        ("seed: 1\nseed: 2", "duplicate"),
        ("seed: \x00", "special characters"),
        ("1: 2\nseed: {}", "is not a key"),
    ],
)  # fmt: skip
def test_hostile_run_yaml_is_told(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=f"cannot be read as the configuration of a run: .*{said}|^.*{said}"):
        read_run(file)
