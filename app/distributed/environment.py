"""Ranks and sizes of the processes, read from the environment that a launcher sets, before torch is loaded."""

import os
from dataclasses import dataclass

from app.errors import EnvironmentProblem

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """Ranks and sizes as torchrun defines them; `local`: within this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def is_joined(self) -> bool:
        """Whether a launcher started this process as one of several."""
        return self.size > 1


def world() -> World:
    """Read the variables of torchrun, accelerate and our own launcher; those of a Slurm task are translated first."""
    if "RANK" not in os.environ:
        _translate_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return World()
    missing = [name for name in _REQUIRED if name not in os.environ]
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
    """Set torchrun's variables from those of a Slurm step with several tasks; a batch script alone is one process."""
    env = os.environ
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) <= 1 or "SLURM_PROCID" not in env:
        return
    tasks_here = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")[0].split("(")[0]
    env["RANK"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env.get("SLURM_LOCALID", "0")
    env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"], tasks_here
    env.setdefault("MASTER_ADDR", _first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    env.setdefault("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000))


def _first_host(nodes: str) -> str:
    """The first host of Slurm's short form: `gpu[03-05,9],login1` begins with gpu03."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.split(",")[0]
    number, _, after = rest.partition("]")
    return f"{name}{number.split(',')[0].split('-')[0]}{after.split(',')[0]}"
