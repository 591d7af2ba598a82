"""What `pip install .` gives: a wheel that holds everything a run needs, and nothing else."""

import email
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPO
from tests.harness.python import printed_by


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(REPO)]
    printed_by("-m", "pip", *command)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, names: set[str]) -> Message:
    (name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(name))


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_has_every_file_of_the_package_every_config_file_and_nothing_else(names: set[str]) -> None:
    expected = {f"app/{name}" for name in files_below(REPO / "app")}
    expected |= {f"app/conf/{name}" for name in files_below(REPO / "conf")}
    assert expected - names == set(), "left out of the wheel, perhaps by a line of .gitignore"
    assert {name for name in names - expected if ".dist-info/" not in name} == set()


def test_metadata_states_what_is_supported(metadata: Message) -> None:
    assert metadata["Requires-Python"] == "<3.13,>=3.11"
    assert metadata["License-Expression"] == "MIT"


def test_at_most_twelve_core_dependencies_each_with_a_lowest_version(metadata: Message) -> None:
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    core = [requirement for requirement in required if requirement.marker is None]
    assert 8 <= len(core) <= 12
    assert {"torch", "transformers", "peft", "bitsandbytes", "datasets", "accelerate", "hydra-core", "wandb"} <= {
        requirement.name for requirement in core
    }
    without = [r.name for r in core if not any(spec.operator == ">=" for spec in r.specifier)]
    assert not without, "a core dependency must state its lowest supported version"
