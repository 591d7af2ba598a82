"""`hardware=`: every file of conf/hardware by itself, what the command line changes, and what is refused."""

import pytest

from app.config.commands import check_config
from app.config.hardware import every_hardware, named, read_hardware
from app.config.load import compose_run
from app.errors import ConfigError


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_config(words)
    return " ".join(refused.value.problems)


def test_every_file_has_sound_facts() -> None:
    table = {hardware.name: hardware for hardware in every_hardware()}
    assert list(table) == named()
    assert "auto" not in table
    for hardware in table.values():
        assert 20 < hardware.memory_gib < 300, hardware.name
        assert 200 < hardware.bandwidth_gb < 20_000, hardware.name
        assert 50 < hardware.bf16_tflops < 5_000, hardware.name
        assert hardware.fp8_tflops is None or 1.5 < hardware.fp8_tflops / hardware.bf16_tflops < 2.5
        has_fp8 = hardware.capability is None or tuple(map(int, hardware.capability.split("."))) >= (8, 9)
        assert has_fp8 == (hardware.fp8_tflops is not None), hardware.name
        assert hardware.names, hardware.name
    sizes = [hardware.memory_gib for hardware in table.values()]
    for nominal in (
        24,
        32,
        40,
        48,
        80,
        141,
        192,
    ):  # of each common size there is one, a bit less than it is sold as
        assert any(0.85 * nominal < size < 1.01 * nominal for size in sizes), nominal


def test_one_is_named_and_its_facts_may_be_changed() -> None:
    found = check_config(["memory", "hardware=h100", "hardware.memory_gib=70.5", "seed=3", "exact=true"])
    assert found.hardware is not None
    assert (found.hardware.name, found.hardware.memory_gib, found.hardware.label) == ("h100", 70.5, "H100")
    assert (found.run.seed, found.overrides, found.exact) == (3, ("seed=3",), True)
    assert read_hardware(["hardware=h100", "hardware.context_gib=null"]) == read_hardware(["hardware=h100"])


def test_a_base_in_fp8_is_not_planned_for_a_gpu_without_it() -> None:
    for name in ("a100", "mi300x"):
        told = refusal("memory", "quantization=fp8", f"hardware={name}")
        assert told.startswith(
            "quantization.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or higher, and"
        )
        assert f"hardware={name} has {'8.0' if name == 'a100' else 'none'}" in told
        assert "choose one of b200, h100, h200, l4," in told
    for name in ("h200", "rtx4090"):
        assert check_config(["memory", "quantization=fp8", f"hardware={name}"]).run.quantization.kind == "fp8"


def test_without_a_name_it_is_the_machine_at_hand() -> None:
    assert check_config(["memory"]).hardware is None
    assert check_config(["hardware=auto"]).hardware is None
    assert (check_config([]).checks, check_config(["data"]).checks) == (("data", "memory"), ("data",))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("hardware=h10",), "hardware=h10: there is no such hardware. Did you mean h100? Choose one of a10,"),
        (("hardware=h100", "hardware.memory_gb=3"), "Did you mean hardware.memory_gib?"),
        (("hardware=h100", "hardware.memory_gib=much"), "hardware.memory_gib=much: expected a number."),
        (("hardware=h100", "hardware.memory_gib=0"), "hardware.memory_gib=0.0 must be above 0"),
        (("hardware.memory_gib=3",), "hardware.memory_gib needs hardware=NAME, which it changes."),
        (("exactt=true",), "exactt is not a key. Did you mean exact?"),
        (("exact=perhaps",), "exact=perhaps: expected true or false."),
        (("exactt=true", "sed=1", "hardware=h10"), "Did you mean seed? hardware=h10:"),
    ],
)
def test_what_is_mistyped_is_told_with_the_right_name(words: tuple[str, ...], told: str) -> None:
    assert told in refusal("memory", *words)


def test_it_belongs_to_the_look_at_memory_alone() -> None:
    assert "hardware=h100: only app.check memory asks for it." in refusal("data", "hardware=h100")
    with pytest.raises(ConfigError, match=r"python -m app\.check memory hardware=h100"):
        compose_run(["hardware=h100"])
