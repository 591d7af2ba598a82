"""What others hold of a GPU: through a library with the structures of NVML's header, compiled here."""

import subprocess

import torch

from app.engine.taken import asked_of_driver


def test_a_real_driver_sees_what_another_process_takes() -> None:
    """Its process may be invisible in a container; its memory is not."""
    import sys

    words = "import torch; kept = torch.zeros(1 << 30, device='cuda'); print('there', flush=True); input()"
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    before = asked_of_driver(uuid)
    assert before is not None
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        during = asked_of_driver(uuid)
        other.communicate("\n")
    assert during is not None
    assert during.total == before.total
    assert 4.2e9 < during.bytes - before.bytes < 7e9
