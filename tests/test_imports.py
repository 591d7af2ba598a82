"""Imports: modules that commands load before they know that a model is needed; class names, which exist once."""

import ast
import subprocess
import sys
from collections import Counter

from tests.conftest import REPO

WITHOUT_TORCH = (  # a package means all of its modules
    *("main", "train", "check", "evaluate", "generate", "export", "report", "reproduce", "convert", "board"),
    *("schema", "completion"),
    *("config", "pages", "sweeps", "tracking", "web"),
    *("base.source", "base.tokenizer"),
    *("data.prepare", "data.sources", "data.tokenizer"),
    *("distributed.launch",),
    *("exports.destination", "exports.llama_cpp"),
    *("optim.lr_schedule", "optim.requirements"),
    *("training.eta", "training.identity", "training.torch_environment"),
)


def modules_of(name: str) -> list[str]:
    package = REPO / "app" / name
    inside = sorted(each.stem for each in package.glob("*.py") if each.stem != "__init__")
    return [f"app.{name}.{each}" for each in inside] or [f"app.{name}"]


def test_modules_import_without_torch() -> None:
    names = [each for name in WITHOUT_TORCH for each in modules_of(name)]
    assert len(names) > 50
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    ended = subprocess.run([sys.executable, "-c", code, *names], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_public_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for file in (REPO / "app").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
