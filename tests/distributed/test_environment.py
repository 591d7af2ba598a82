"""Which process this is, in the words of every launcher."""

import os

import pytest

from app.distributed.launch import World, world
from app.errors import EnvironmentProblem

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "1234567",
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_world_without_variables_is_one_process() -> None:
    assert world() == World(rank=0, size=1, local_rank=0, local_size=1)
    assert world().is_first
    assert not world().is_joined


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM], ids=["torchrun", "srun"])
def test_world_of_each_launcher_is_read(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, variables)
    assert world() == World(rank=5, size=8, local_rank=1, local_size=4)
    assert world().is_joined


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("login1,gpu[03-05]", "login1"),
        ("node-a", "node-a"),
        ("rack1-[2-3]-x", "rack1-2-x"),
    ],
)
def test_world_of_srun_names_the_first_host_and_a_port(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, SLURM | {"SLURM_STEP_NODELIST": nodes})
    world()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (first, str(20_000 + 1234567 % 20_000))


def test_world_of_slurm_batch_script_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert world() == World()


def test_world_with_missing_variables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, {"WORLD_SIZE": "2", "RANK": "0"})
    with pytest.raises(EnvironmentProblem, match="LOCAL_RANK and MASTER_ADDR and MASTER_PORT is not set"):
        world()
