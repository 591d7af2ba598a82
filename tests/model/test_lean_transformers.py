"""transformers as it is imported here: each of its modules is looked at once, and it exports what it exports."""

import json
import subprocess
import sys
from typing import Any

import pytest

from app.model.lean_transformers import _from_exports

# how often each module of a model is looked at, and what the two lazy packages are made of in the end
PROGRAM = """
import collections, json, pathlib, sys
opened = collections.Counter()
def note(event, given):
    if event == "open" and sys._getframe(1).f_code.co_filename.endswith("import_utils.py"):
        opened[str(given[0])] += 1
sys.addaudithook(note)
{begin}
import transformers, transformers.models
from transformers import AutoConfig
assert AutoConfig.for_model("llama").model_type == "llama"
models = str(pathlib.Path(transformers.__file__).parent / "models")
looked_at = [count for file, count in opened.items() if file.startswith(models) and file.endswith(".py")]
def told(package):
    kept = vars(package)
    where = {{name: str(place) for name, place in kept["_class_to_module"].items()}}
    lacking = {{name: sorted(map(str, backends)) for name, backends in kept["_object_missing_backend"].items()}}
    return [where, lacking, sorted(dir(package))]
print(json.dumps([looked_at, told(transformers), told(transformers.models)]))
"""
PLAIN = "import transformers"
LEAN = "from app.model.lean_transformers import import_transformers as begin; begin()"


def told(begin: str) -> Any:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(begin=begin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_module_is_looked_at_once_and_the_same_is_found() -> None:
    plainly_looked_at, *plain = told(PLAIN)
    looked_at, *lean = told(LEAN)
    assert lean == plain
    assert len(lean[0][0]) > 3000, "names that it exports"
    assert set(looked_at) == {1}
    assert len(looked_at) == len(plainly_looked_at) > 1000


@pytest.mark.parametrize(
    "begin",
    [
        "from app.config.load import compose_run as run; from app.model.tokenizer import load_tokenizer as load; "
        "load(run([]).model, needs_template=False)",
        "from app.config.load import compose_run as run; from app.model.weights import numbers_at_hand as load; "
        "from app.model.tasks import task_of as task; load(run(['model=llama']).model, task(run([]).task))",
    ],
    ids=["the-tokenizer-first", "the-model-first"],
)
def test_whatever_a_command_needs_first(begin: str) -> None:
    assert set(told(begin)[0]) == {1}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('a = 1\n__all__ = ["a"]\n', '__all__ = ["a"]\n'),
        ('__all__ = ["a"]\nb\n__all__ = [\n"b",\n]\n', '__all__ = [\n"b",\n]\n'),
        ('__all__ = ["a"]\n', '__all__ = ["a"]\n'),
        ("x.__all__ = 1\n", "x.__all__ = 1\n"),
        ("", ""),
    ],
    ids=["at-the-end", "the-last", "at-the-start", "not-at-the-start-of-a-line", "nothing"],
)
def test_a_file_counts_from_its_last_exports(text: str, kept: str) -> None:
    from transformers.utils.import_utils import fetch__all__

    assert _from_exports(text) == kept
    assert fetch__all__(kept) == fetch__all__(text)


def test_it_lends_nothing_to_what_is_imported_later() -> None:
    finders = list(sys.meta_path)
    from app.model.lean_transformers import import_transformers

    import_transformers()
    assert sys.meta_path == finders
