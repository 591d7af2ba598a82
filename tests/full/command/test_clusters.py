"""The commands of the manifests in scripts/cluster, each run as two machines with the variables of its launcher."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.files import verify_checksums
from scripts.cluster.ray_job import run_code
from tests.conftest import REPO
from tests.full.command.machines import SCRIPTS, Machine, children_of, free_port, of_two_machines
from tests.harness.runs import SMALL, numbers, wait_until

RUN = "output_dir=/shared/runs/mine recipe=qlora model=llama"  # of all manifests
ENTRYPOINT = "/opt/nvidia/nvidia_entrypoint.sh"  # of the image
PORT = "29400"
BOTH = "127.0.0.1\n127.0.0.1"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((SCRIPTS / name).read_text()))


def in_image(command: list[str]) -> list[str]:
    assert command[0] == ENTRYPOINT
    return command[1:]


def kubernetes(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    service, job = documents("kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(node),
        "status.podIP": "127.0.0.1",
    }
    variables = {
        entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }
    # the host name of the first pod of an Indexed Job
    assert variables["RENDEZVOUS"] == f"{job['metadata']['name']}-0.{pod['subdomain']}:{PORT}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["NODES"] == str(job["spec"]["completions"])
    return [*in_image(container["command"]), *container["args"]], variables | {"RENDEZVOUS": f"127.0.0.1:{port}"}


def kubeflow(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    trainer = documents("kubeflow.yaml")[1]["spec"]["trainer"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }
    return [*in_image(trainer["command"]), *trainer["args"]], variables


def skypilot(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    (task,) = documents("skypilot.yaml")
    variables = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NODE_IPS": BOTH,
        "SKYPILOT_TASK_ID": "sky-managed-1",
    }
    return ["bash", "-c", f"{task['setup']}\n{task['run']}".replace(PORT, port)], variables


def dstack(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    (task,) = documents("dstack.yaml")
    variables = {
        "DSTACK_NODES_NUM": str(task["nodes"]),
        "DSTACK_NODE_RANK": str(node),
        "DSTACK_MASTER_NODE_IP": "127.0.0.1",
        "DSTACK_NODES_IPS": BOTH,
        "DSTACK_RUN_NAME": "finetune",
    }
    return ["bash", "-c", " && ".join(task["commands"]).replace(PORT, port)], variables


def ray(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    """What a task of Ray does on its machine, without Ray."""
    call = f"sys.exit(run_node({node}, 2, '127.0.0.1:{port}', 'job-0', 1, {RUN.split()!r}))"
    return [sys.executable, "-c", f"import sys; from scripts.cluster.ray_job import run_node; {call}"], {}


LAUNCHERS = {"kubernetes": kubernetes, "kubeflow": kubeflow, "skypilot": skypilot, "dstack": dstack, "ray": ray}


def has_torchrun(pid: int) -> bool:
    """Whether a process, or one below it, is torchrun."""
    with suppress(OSError):  # it has just ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"torch.distributed.run" in command or any(map(has_torchrun, children_of(pid)))
    return False


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    started: list[Machine] = []
    yield started
    for machine in started:
        machine.die()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_manifest_command_on_two_machines_joins_and_prints_on_the_first(
    launcher: str, machines: list[Machine], app_env: Mapping[str, str], quick_python: Path, tmp_path: Path
) -> None:
    run, port = tmp_path / "run", str(free_port())
    tiny = [*SMALL, "training.max_steps=3", f"output_dir={run}", f"checkpoint.mirror=file://{tmp_path}/copies"]
    by_user = {"TMPDIR": str(tmp_path), "ADDRESS": "127.0.0.1", "APP_PYTHON": str(quick_python), "PROCESSES": "1"}
    for node in (1, 0):  # torchrun would make the machine that starts first the first one
        command, variables = LAUNCHERS[launcher](node, port)
        command = [word.replace(repr(RUN.split()), repr(tiny)).replace(RUN, shlex.join(tiny)) for word in command]
        if RUN.split()[0] in command:
            command = [*command[: command.index(RUN.split()[0])], *tiny]
        env = {**app_env, **by_user, "PYTHONPATH": str(REPO), **variables, "MORE_RENDEZVOUS": "join_timeout=60"}
        machines.append(Machine(command[0], command[1:], tmp_path, env, REPO))
        wait_until(partial(has_torchrun, machines[-1].process.pid), 30)
    second, first = machines
    assert [first.ended(), second.ended()] == [0, 0], first.printed + second.printed

    assert [line["step"] for line in numbers(run)][-1] == 3
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["choices"]["processes"] == 2
    assert len(manifest["starts"]) == 1
    assert f"output  {run}" in first.printed
    assert "output  " not in second.printed
    assert (run / "log-rank-1.txt").is_file()
    assert verify_checksums(run / "final") is None
    assert verify_checksums(tmp_path / "copies/run/final") is None
    assert first.printed.count("copied to ") == 1


def test_machines_with_different_numbers_of_processes_are_refused(
    machines: list[Machine], app_env: Mapping[str, str], quick_python: Path, tmp_path: Path
) -> None:
    env = {**app_env, **of_two_machines(tmp_path, quick_python)}
    for node in (0, 1):
        here = {"NODE": str(node), "PROCESSES": str(1 + node)}
        machines.append(Machine(SCRIPTS / "node.sh", ["output_dir=run"], tmp_path, env | here))
    assert [machine.ended() for machine in machines] == [2, 2]
    assert "PROCESSES=1 on machine 0, but 2 machines have 3 processes together" in machines[0].printed


@pytest.mark.parametrize("job", [documents("kubernetes.yaml")[1], documents("kubeflow.yaml")[0]])
def test_pods_of_a_saved_run_start_again_and_wrong_settings_end_the_job(job: dict[str, Any]) -> None:
    spec = job["spec"]
    if job["kind"] == "TrainingRuntime":
        (replicated,) = spec["template"]["spec"]["replicatedJobs"]
        spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires it
    (container,) = pod["containers"]
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if rule.get("onExitCodes", {}).get("containerName") == container["name"]
        for code in rule["onExitCodes"]["values"]
    }
    assert actions == {2: "FailJob", 75: "Ignore"}
    assert pod["terminationGracePeriodSeconds"] >= 300


def test_skypilot_recovers_a_saved_run() -> None:
    (task,) = documents("skypilot.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([75, 75], 75), ([1, 75], 1), ([0, 75], 75), ([75, 2], 2), ([1, 130], 130)]
)
def test_ray_exit_code_of_a_run(codes: list[int], code: int) -> None:
    assert run_code(codes) == code
