"""app.train on a processor with as much memory as MEMORY_BYTES says.

python -m tests.small_machine WORDS...
"""

import os


def main() -> None:
    """A run that believes it."""
    from app import train
    from app.memory import fit

    given = int(os.environ["MEMORY_BYTES"])
    vars(fit)["_host_memory"] = lambda: given
    train.main()


if __name__ == "__main__":
    main()
