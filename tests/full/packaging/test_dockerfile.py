"""The Dockerfile, which nobody here can build, as far as it can be judged by reading it."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.image.check import library, problems
from tests.conftest import REPO
from tests.full.packaging.dockerfile import arguments, complaints, environment, ignored, instructions

TEXT = (REPO / "Dockerfile").read_text()
STEPS = instructions(TEXT)
CUDA = {
    "26.06-py3": "13.3"
}  # of torch in the image; look it up in NVIDIA's release notes when the tag changes


def test_dockerfile_is_in_order() -> None:
    assert complaints(TEXT, REPO) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("ARG NGC_TAG=26.06-py3", "ARG NGC_TAG=latest", "NGC_TAG has no release"),
        ("ARG NGC_TAG=26.06-py3\n", "", "NGC_TAG has no release"),
        ("nvcr.io/nvidia/pytorch:", "docker.io/pytorch/pytorch:", "not NVIDIA's image"),
        ("\nARG NGC_TAG\n", "\n", "LABEL: NGC_TAG is used before"),
        ("ARG UID=10001\n", "", "RUN: UID is used before"),
        ("COPY conf conf", "COPY config conf", "COPY config: there is no such file"),
        ("COPY conf conf", "COPY docs docs", "COPY docs: .dockerignore keeps it out"),
        ("COPY conf conf", "ADD conf conf", "ADD: unknown"),
        ("COPY conf conf", "HEALTCHECK NONE", "HEALTCHECK: unknown"),
        ("ENV PIP_CONSTRAINT=/etc/pip/constraint.txt", "ENV OTHER=1", "PIP_CONSTRAINT is not kept"),
        ("USER ${UID}", "USER root", "USER root"),
        ("ARG UID=10001", "ARG UID=0", "USER 0"),
        (
            '["/opt/nvidia/nvidia_entrypoint.sh", "python", "-m", "app.train"]',
            "python -m app.train",
            "ENTRYPOINT",
        ),
    ],
)
def test_what_would_be_wrong_is_seen(right: str, wrong: str, said: str) -> None:
    assert right in TEXT
    assert [complaint for complaint in complaints(TEXT.replace(right, wrong), REPO) if said in complaint]


def test_only_what_the_image_is_built_from_is_sent() -> None:
    rules = (REPO / ".dockerignore").read_text().splitlines()
    assert not ignored("app/train.py", rules)
    assert not ignored("scripts/image/install.py", rules)
    for name in (".git", ".venv", "runs", "tests", "scripts/setup", "Dockerfile", "app/__pycache__", ".env"):
        assert ignored(name, rules), name


def test_a_wheel_can_be_built_from_what_is_copied(tmp_path: Path) -> None:
    for step in STEPS:
        if step.name == "COPY":
            *sources, to = step.text.split()
            for source in map(Path, sources):
                if (REPO / source).is_dir():
                    shutil.copytree(REPO / source, tmp_path / to)
                else:
                    shutil.copy(REPO / source, tmp_path / to)
    command = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(tmp_path),
    ]
    built = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"app/train.py", "app/conf/config.yaml"} <= set(archive.namelist())
    assert (tmp_path / "scripts/image/install.py").is_file()


def test_entry_is_the_program_behind_nvidias_script() -> None:
    """NVIDIA's is kept: it makes the libraries for the host's driver known before it becomes the program."""
    (entry,) = (json.loads(step.text) for step in STEPS if step.name == "ENTRYPOINT")
    assert entry == ["/opt/nvidia/nvidia_entrypoint.sh", "python", "-m", "app.train"]


def test_every_cache_is_in_the_volume() -> None:
    (volumes,) = (json.loads(step.text) for step in STEPS if step.name == "VOLUME")
    assert volumes == ["/cache", "/workspace/app/runs"]
    kept = environment(STEPS)
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert kept[name].startswith("/cache"), name


def test_bitsandbytes_has_a_library_for_the_cuda_of_the_image() -> None:
    cuda = CUDA[arguments(STEPS[:1])["NGC_TAG"]]
    found = library(cuda)
    assert found.is_file()
    assert found.name.startswith(f"libbitsandbytes_cuda{cuda.partition('.')[0]}")


def test_an_image_for_another_cuda_is_found_out() -> None:
    assert problems("99.0") == [
        "bitsandbytes has no library for CUDA 99.0: recipe=qlora and 8-bit optimizers would fail"
    ]
