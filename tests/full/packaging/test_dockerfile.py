"""The Dockerfile, which cannot be built without a network, as far as it can be judged by reading it."""

import re
import shutil
import zipfile
from pathlib import Path

from scripts.image.check import library, problems
from tests.conftest import REPO
from tests.harness.python import printed_by

CUDA = {"26.06-py3": "13.3"}  # of torch in the image; look it up in NVIDIA's release notes when the tag changes
TEXT = re.sub(r"\\\n\s*", " ", (REPO / "Dockerfile").read_text())


def test_a_wheel_can_be_built_from_what_is_copied(tmp_path: Path) -> None:
    for copied in re.findall(r"^COPY (.+)", TEXT, re.MULTILINE):
        *sources, to = copied.split()
        for source in map(REPO.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, tmp_path / to)
            else:
                shutil.copy(source, tmp_path / to)
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path)]
    printed_by("-m", "pip", *command, str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"app/train.py", "app/conf/config.yaml"} <= set(archive.namelist())
    assert (tmp_path / "scripts/image/install.py").is_file()


def test_every_cache_is_in_the_volume() -> None:
    assert 'VOLUME ["/cache", "/workspace/app/runs"]' in TEXT
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert re.search(rf"\b{name}=/cache", TEXT), name


def test_bitsandbytes_has_a_library_for_the_cuda_of_the_image() -> None:
    (tag,) = re.findall(r"^ARG NGC_TAG=(\S+)", TEXT, re.MULTILINE)
    found = library(CUDA[tag])
    assert found.is_file()
    assert found.name.startswith(f"libbitsandbytes_cuda{CUDA[tag].partition('.')[0]}")
    assert problems("99.0") == [
        "bitsandbytes has no library for CUDA 99.0: recipe=qlora and 8-bit optimizers would fail"
    ]
