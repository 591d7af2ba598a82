"""Python looks for garbage as often as it pays, and as usual afterwards."""

import gc
import subprocess
import sys

import pytest

from app.config import garbage

ENDS = """
import atexit, gc, sys
atexit.register(lambda: print("left lying", gc.get_freeze_count()))
from app import check
sys.argv = ["check", "memori"]
check.main()
"""


def test_it_is_looked_for_again_afterwards() -> None:
    assert gc.isenabled()
    with garbage.not_looked_for():
        assert not gc.isenabled()
        with garbage.not_looked_for():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one ends it"
    with pytest.raises(KeyError), garbage.not_looked_for():
        raise KeyError
    assert gc.isenabled()


def test_a_check_leaves_its_objects_to_the_system_however_it_ends(app_env: dict[str, str]) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], env=app_env, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "memori" in ended.stderr
    assert int(ended.stdout.rpartition(" ")[2]) > 10_000
