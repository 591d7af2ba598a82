"""scripts/image/install.py in an environment whose metadata is that of NVIDIA's image."""

import json
import os
from pathlib import Path

import pytest

from scripts.image.install import canonical, constraints, pins, protected
from tests.conftest import REPO
from tests.full.packaging.image import NVIDIA, OTHERS, Image, make_image, make_project, make_wheel
from tests.harness.marks import requires_package_index

OURS = pins((REPO / "constraints.txt").read_text().splitlines())
NEWER_TORCH = ("torch>=2.14", "--dry-run", "--quiet", "--report", "-")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return make_image(tmp_path_factory.mktemp("nvidia") / "image")


@pytest.fixture
def image(pristine: Image, tmp_path: Path) -> Image:
    return pristine.copy_to(tmp_path / "image")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of packages, with newer versions of what must stay."""
    folder = tmp_path / "index"
    for name, version in {"torch": "2.14.0", "triton": "9.0", "flash-attn": "9.0", "nvidia-more": "1.0"}.items():
        make_wheel(folder, name, version)
    return folder


def offline(index: Path) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}


@requires_package_index
def test_all_that_the_program_needs_is_found_and_nothing_of_nvidia_is_touched(
    image: Image, index: Path, tmp_path: Path
) -> None:
    has, limits, report = image.versions(), tmp_path / "limits.txt", tmp_path / "report.json"
    limits.write_text("\n".join(constraints(has, OURS)) + "\n")
    found = " ".join(filter(None, (os.environ.get("PIP_FIND_LINKS"), str(index))))
    dry = ("-m", "pip", "install", "--dry-run", "--report", str(report), "--constraint", str(limits))
    ended = image.run(*dry, f"{REPO}[tensorboard]", PIP_FIND_LINKS=found, PIP_CONSTRAINT="")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    chosen = {canonical(item["name"]): item["version"] for item in items}
    assert not protected(chosen)
    new = chosen.keys() - has.keys()
    assert {"transformers", "peft", "bitsandbytes", "datasets", "accelerate", "wandb"} <= new
    assert {name: OURS.get(name) for name in chosen if name != "app-finetune"} == {
        name: version for name, version in chosen.items() if name != "app-finetune"
    }, "what is installed is what was tested"
    assert not {"numpy", "pyyaml", "pillow"} & chosen.keys(), "what will do is kept"
    assert {"rich", "tensorboard"} <= chosen.keys() & has.keys(), "older than pyproject.toml allows"


@pytest.mark.parametrize("file", ["full", "absent"])
def test_installs_what_is_missing_replaces_what_is_too_old_and_renews_the_constraints(
    image: Image, index: Path, tmp_path: Path, file: str
) -> None:
    image.add({"aged": "1.0", "enough": "1.5", "foreign": "7"})
    if file == "absent":
        image.constraint.unlink()
    for name, version in (("fresh", "1.0"), ("fresh", "1.1"), ("aged", "2.0"), ("aged", "2.1"), ("enough", "3.0")):
        make_wheel(index, name, version)
    needs = ("torch>=2.10", "fresh", "aged>=1.8", "enough", "numpy")
    ours = ("torch==2.13.0", "fresh==1.0", "aged==2.0", "enough==3.0", "numpy==2.4.6")
    project = make_project(tmp_path / "a project", needs, ours)

    ended = image.install(str(project), **offline(index))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "replaced: aged 1.0 -> 2.0" in ended.stdout
    has = image.versions()
    assert (has["tiny"], has["fresh"], has["aged"], has["enough"]) == ("1.0", "1.0", "2.0", "1.5")
    assert has.items() >= {canonical(name): version for name, version in (NVIDIA | OTHERS).items()}.items()

    held = pins(image.constraint.read_text().splitlines())
    assert (held["torch"], held["aged"], held["fresh"]) == (NVIDIA["torch"], "2.0", "1.0")
    assert held.get("foreign") == ("7" if file == "full" else None)
    later = image.run("-m", "pip", "install", *NEWER_TORCH, **offline(index))
    assert later.returncode == 1, "the renewed file guards torch against what is installed on top"


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        # an alpha of 2.13 comes before 2.13, so a lower bound in pyproject.toml has to leave room for it
        pytest.param("torch>=2.13", "error: pip install failed with exit code 1", id="another torch"),
        pytest.param("nvidia-more", "packages of the image were changed: nvidia-more", id="more of nvidia"),
    ],
)
def test_a_requirement_that_would_touch_nvidias_packages_ends_the_build(
    image: Image, index: Path, tmp_path: Path, needed: str, said: str
) -> None:
    project = make_project(tmp_path / "project", [needed], ["torch==2.14.0"])
    ended = image.install(str(project), **offline(index))
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert image.versions()["torch"] == NVIDIA["torch"]
