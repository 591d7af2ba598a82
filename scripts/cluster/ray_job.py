"""A multi-node run on a Ray cluster: one task per machine runs node.sh, where torchrun starts the processes.

    ray job submit --working-dir . -- python scripts/cluster/ray_job.py --nodes 2 --gpus 8 \
        output_dir=/shared/runs/mine recipe=qlora model=llama

The packages of this program must be installed in the Python of Ray's workers, or in another one: set APP_PYTHON in the
runtime environment of the job. A task whose machine is lost runs again on another one and joins the run. A run that
was saved (exit code 75) or failed is started again. `ray job stop` kills the run; submit it again to resume.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DONE, USER_ERROR, SAVED, CTRL_C = 0, 2, 75, 130


def run_node(node: int, nodes: int, rendezvous: str, run_id: str, processes: int, arguments: Sequence[str]) -> int:
    """Run node.sh on this machine and return its exit code."""
    address = os.environ.get("ADDRESS") or address_of_this_machine()
    defaults = {"APP_PYTHON": sys.executable, "PROCESSES": str(processes)}
    numbers = {"NODE": str(node), "NODES": str(nodes), "RENDEZVOUS": rendezvous, "RUN_ID": run_id, "ADDRESS": address}
    script = Path.cwd() / "scripts/cluster/node.sh"  # Ray copies --working-dir to all machines
    return subprocess.run([str(script), *arguments], env=defaults | os.environ | numbers, check=False).returncode


def address_of_this_machine() -> str:
    """Return the IP address by which other machines reach this one; a UDP connection sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect(("10.255.255.255", 1))
        address: str = connection.getsockname()[0]
    return address


def free_endpoint() -> str:
    """Return the address and a free port of this machine."""
    with socket.socket() as connection:
        connection.bind(("", 0))
        return f"{address_of_this_machine()}:{connection.getsockname()[1]}"


def run_code(codes: Sequence[int]) -> int:
    """Return the exit code of a run: of those of its machines, an error that a restart repeats, a failure, or saved."""
    return min(codes, key=lambda code: (code not in (USER_ERROR, CTRL_C), code == DONE, code == SAVED))


def run_on_all(ray: Any, nodes: int, gpus: int, run_id: str, arguments: Sequence[str]) -> int:
    """Run one task per machine on different machines and return the exit code of the run."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    group = placement_group([resources] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    on_nodes = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in range(nodes)]
    try:
        endpoint, task = ray.remote(num_cpus=1)(free_endpoint), ray.remote(num_cpus=1, num_gpus=gpus)(run_node)
        rendezvous = ray.get(endpoint.options(scheduling_strategy=on_nodes[0]).remote())
        tasks = [
            task.options(scheduling_strategy=place).remote(node, nodes, rendezvous, run_id, max(gpus, 1), arguments)
            for node, place in enumerate(on_nodes)
        ]
        return run_code(ray.get(tasks))
    except ray.exceptions.RayError as fault:
        print(f"a machine was lost: {fault}", file=sys.stderr)
        return 1
    finally:
        remove_placement_group(group)


def main() -> None:
    """Start the run, and again from its last checkpoint after it was saved or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="number of machines")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs per machine; 0: one process on CPUs")
    parser.add_argument("--restarts", type=int, default=10, help="restarts after a failure or a save")
    options, arguments = parser.parse_known_args()
    import ray

    ray.init()
    job = ray.get_runtime_context().get_job_id()
    code = DONE
    for start in range(options.restarts + 1):
        code = run_on_all(ray, options.nodes, options.gpus, f"{job}-{start}", arguments)
        if code in (DONE, USER_ERROR, CTRL_C):
            break
    sys.exit(code)


if __name__ == "__main__":
    main()
