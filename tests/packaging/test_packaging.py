"""The wheel, and pins in constraints.txt against the ranges of pyproject.toml."""

import email
import tomllib
import zipfile
from email.message import Message
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import REPO
from tests.harness.marks import requires_pinned_environment
from tests.harness.python import printed_by

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
# they name their own versions, and are in nobody's environment but that of who measures with them, or runs notebooks
UNPINNED = {"lm-eval", "notebook"}
EXTRAS = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name not in UNPINNED}


def pins() -> dict[str, Version]:
    found: dict[str, Version] = {}
    for line in (REPO / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (spec,) = requirement.specifier
            assert (spec.operator, spec.version.count("*")) == ("==", 0), f"{line}: not an exact pin"
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{line}: pinned twice"
            found[name] = Version(spec.version)
    return found


def asked_for() -> list[Requirement]:
    """All but triton: a torch for CUDA pins it itself, and a pin of ours might not be the same."""
    lists = [PROJECT["dependencies"], *EXTRAS.values(), ["hatchling>=1.27,<2"]]
    asked = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in asked if requirement.name != "triton"]


@pytest.mark.parametrize("requirement", asked_for(), ids=str)
def test_pin_is_inside_the_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def is_of_a_torch_build(name: str) -> bool:
    """Return whether only some builds of torch need the package; NVML is read on all of them."""
    return name == "triton" or (name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py")


def test_nothing_that_only_some_builds_of_torch_need_is_pinned() -> None:
    assert not [name for name in pins() if is_of_a_torch_build(name)]


def needed(roots: list[Requirement]) -> set[str]:
    """All installed packages that `roots` lead to, in this environment."""
    seen: set[str] = set()
    waiting = [(root.name, extra) for root in roots for extra in ("", *root.extras)]
    while waiting:
        name, extra = waiting.pop()
        seen.add(canonicalize_name(name))
        for line in _requires(name):
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if applies and canonicalize_name(requirement.name) not in seen:
                waiting += [(requirement.name, e) for e in ("", *requirement.extras)]
    return seen


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def test_pins_are_what_the_requirements_lead_to() -> None:
    reached = {name for name in needed(asked_for()) if not is_of_a_torch_build(name)}
    # setuptools and editables are asked for by builds, which state it in their own metadata only
    assert set(pins()) - {"setuptools", "editables"} <= reached, "pinned, but nothing asks for it"
    assert reached <= set(pins()), "asked for, directly or indirectly, but not pinned"


@requires_pinned_environment
def test_this_environment_is_the_pinned_one() -> None:
    reached = needed(asked_for())
    different = {
        name: f"pinned {pin}, installed {version(name)}"
        for name, pin in pins().items()
        if name in reached and Version(version(name)).public != str(pin)
    }
    assert not different


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
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert metadata["License-Expression"] == "MIT"


def test_at_most_thirteen_core_dependencies_each_with_a_lowest_version(metadata: Message) -> None:
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    core = [requirement for requirement in required if requirement.marker is None]
    assert 8 <= len(core) <= 13
    assert {"torch", "transformers", "peft", "bitsandbytes", "datasets", "accelerate", "hydra-core", "wandb"} <= {
        requirement.name for requirement in core
    }
    without = [r.name for r in core if not any(spec.operator == ">=" for spec in r.specifier)]
    assert not without, "a core dependency must state its lowest supported version"
