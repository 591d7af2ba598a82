"""Which process this is, of how many: read from the environment that a launcher sets, before torch is loaded."""

import os
from dataclasses import dataclass

from app.errors import EnvironmentProblem

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """`local` is within this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """The one process that speaks and writes."""
        return self.rank == 0

    @property
    def is_joined(self) -> bool:
        """Whether a launcher started this process as one of several."""
        return self.size > 1


def world() -> World:
    """As torchrun, accelerate and our own launcher tell it; a task of Slurm's srun is told in the same words first."""
    if "RANK" not in os.environ:
        _translate_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return World()
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise EnvironmentProblem(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this process was started as one of several, but "
            f"{' and '.join(missing)} is not set. Start it with torchrun, "
            "accelerate launch or srun, or unset WORLD_SIZE."
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    return World(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
    )


def _translate_slurm() -> None:
    """Of a step with several tasks; a batch script by itself is one process, whatever its job has."""
    told = os.environ
    if int(told.get("SLURM_STEP_NUM_TASKS", "1")) <= 1 or "SLURM_PROCID" not in told:
        return
    tasks_here = told.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")[0].split("(")[0]
    told["RANK"], told["LOCAL_RANK"] = told["SLURM_PROCID"], told.get("SLURM_LOCALID", "0")
    told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"] = told["SLURM_STEP_NUM_TASKS"], tasks_here
    told.setdefault("MASTER_ADDR", _first_host(told.get("SLURM_STEP_NODELIST", "localhost")))
    told.setdefault("MASTER_PORT", str(20_000 + int(told.get("SLURM_JOB_ID", "0")) % 20_000))


def _first_host(nodes: str) -> str:
    """Of Slurm's short form: `gpu[03-05,9],login1` begins with gpu03."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.split(",")[0]
    number, _, after = rest.partition("]")
    return f"{name}{number.split(',')[0].split('-')[0]}{after.split(',')[0]}"
