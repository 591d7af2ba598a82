"""`finetune train` as one of several processes, of which process 1 has a fault.

python -m tests.full.command.faulty_process FAULT [arguments of finetune train]
"""

import os
import resource
import sys

from app import train
from app.training import setup

LARGEST_FILE = 60_000


def bug() -> None:
    def build_optimizer(*_: object) -> None:
        raise KeyError("injected")

    vars(setup)["build_optimizer"] = build_optimizer


def file_limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


def main() -> None:
    name, *sys.argv[1:] = sys.argv[1:]
    if os.environ["RANK"] == "1":
        {"bug": bug, "file limit": file_limit}[name]()
    train.main()
