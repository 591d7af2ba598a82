"""The kernels compiled for Hopper: Triton needs no GPU for that, and what it refuses is no news to a GPU host then."""

from pathlib import Path

from tests.conftest import REPO
from tests.harness.marks import requires_triton
from tests.harness.python import printed_by


@requires_triton
def test_compile_for_hopper(app_env: dict[str, str], tmp_path: Path) -> None:
    """Stores of 16 bytes; and no product and sum in one rounding where bits count."""
    program = str(REPO / "tests" / "full" / "model" / "compiled_kernels.py")
    with_gradient, without, fp8 = printed_by(program, env=app_env | {"TRITON_CACHE_DIR": str(tmp_path)}).splitlines()
    assert "st.global.v4.b32" in with_gradient
    assert "st.global.v4" not in without
    assert "fma" in with_gradient, "so its absence tells something"
    assert "st.global.v4.b32" in fp8
    assert "fma" not in fp8, "a product and its rounding by itself, as torch does it"
