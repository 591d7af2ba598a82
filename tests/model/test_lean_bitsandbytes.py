import subprocess
import sys

PROGRAM = """
import sys, torch
own = torch.compile
from app.model.lean_bitsandbytes import import_bitsandbytes
import_bitsandbytes()
assert torch.compile is own
assert "torch._inductor.compile_fx" not in sys.modules
from bitsandbytes.backends.default.ops import _optimizer_update_32bit
asked = []
torch.compile = lambda function, **options: asked.append(function.__name__) or (lambda *given: "compiled")
assert [_optimizer_update_32bit(1), _optimizer_update_32bit(2)] == ["compiled"] * 2
print(asked)
"""


def test_what_bitsandbytes_compiles_is_compiled_when_it_is_called() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['_optimizer_update_32bit']"
