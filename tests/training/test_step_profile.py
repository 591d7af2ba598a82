"""Time of a step by kind of operation."""

import json
from pathlib import Path

import pytest

from app.signals import StopRequest
from app.tracking.output_dir import RunFolder
from app.training.trainer import BETWEEN, OTHER, kind_of
from tests.harness.runs import samples_of
from tests.training.conftest import MakeLoop, small_run


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "contractions": "aten::mm aten::addmm_ aten::bmm aten::_scaled_mm aten::_flash_attention_backward",
        "normalisations": "aten::native_layer_norm aten::_softmax aten::linalg_vector_norm aten::mean triton_red_add",
        "element-wise": "aten::mul_ aten::_fused_adamw_ aten::silu_backward bitsandbytes::dequantize_4bit triton_poi_0",
        "copies": "aten::copy_ aten::_to_copy aten::cat aten::zero_ aten::index_select aten::embedding_dense_backward",
        "own kernels": "app_kernels::loss_and_grad app_kernels::dequantize_4bit",
        "collectives": "c10d::allreduce_ gloo:all_reduce fsdp::all_gather_copy_in",
        OTHER: "aten::view aten::empty autograd::engine::evaluate_function:_MulBackward0",
    }.items(),
)
def test_operations_have_kinds_by_name(kind: str, names: str) -> None:
    assert {name: kind_of(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_profiled_step_changes_no_number_and_does_not_count_in_the_speed(make_loop: MakeLoop, tmp_path: Path) -> None:
    words = ("recipe=lora", "eval.every=0", "checkpoint.every=0", "record.every=1")
    (plain, expected), (loop, notebook) = (
        make_loop(small_run(*words, *more), 4) for more in ((), ("training.profile_step=3",))
    )
    notebook.folder = RunFolder(tmp_path)
    assert plain.fit(StopRequest())
    assert loop.fit(StopRequest())
    assert [line["loss"] for line in notebook.steps] == [line["loss"] for line in expected.steps]
    assert [line["step"] for line in notebook.steps if "tokens_per_second" not in line] == [3]
    rows = [samples_of(line) for line in expected.steps]
    assert samples_of(loop.speed) == sum(rows) - rows[2]
    assert loop.memory.bytes == plain.memory.bytes

    facts = json.loads((tmp_path / "profile.json").read_text())
    assert (facts["step"], facts["device"]) == (3, "cpu")
    assert sum(facts["kinds"].values()) == pytest.approx(facts["seconds"])
    of_operations = sum(each["seconds"] for each in facts["operations"])
    assert of_operations == pytest.approx(facts["seconds"] - facts["kinds"][BETWEEN])
    assert all(facts["kinds"][kind] > 0 for kind in ("contractions", "normalisations", "element-wise", "copies"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (table,) = [text for text in notebook.messages if text.startswith("profile of step 3")]
    assert "contractions" in table
