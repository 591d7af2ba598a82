"""Write docs/keys.md, the table of docs/coming-from.md and the GPUs of docs/check.md, from conf/ and app/config.

python -m scripts.make_keys
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from app.config.commands import all_hardware
from app.config.converted_settings import PROGRAMS
from app.config.help import meanings, values_of
from app.config.json_schema import description
from app.config.load import default_values
from app.config.schema import RunConfig
from app.config.validate import SECTIONS, format_value, other_programs

DOCS = Path(__file__).resolve().parents[1] / "docs"
_END = "<!-- end -->"  # of a generated table
_PROGRAMS = {
    "axolotl": "Axolotl",
    "llama_factory": "LLaMA-Factory",
    "trl": "TRL, transformers, PEFT, Unsloth",
    "torchtune": "torchtune",
    "others": "other names",
}
_HEAD = """\
# Every key

Made by `python -m scripts.make_keys` from [the schema](../app/config/schema.py). `KEY=VALUE` sets a key,
`GROUP=CHOICE` sets a section ([configuration](config.md)). The default is that of `finetune train` without
arguments; `${...}` refers to another key. A key with names in brackets is read by these choices of its group alone.
A key marked "command line only" is not taken from a file of settings or a run folder ([SECURITY.md](../SECURITY.md)).
"""
_MAX_MAPPING_CHARACTERS = 60


def keys_page() -> str:
    """Return the content of docs/keys.md."""
    sections = "\n".join(_section(RunConfig, "", default_values()))
    return f"{_HEAD}\n{sections}"


def _section(section: Any, prefix: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of a section, then those of its subsections."""
    documentation = meanings(section)
    keys = [entry for entry in fields(section) if not is_dataclass(entry.type)]
    yield from (f"## {prefix.rstrip('.') or 'The run'}", "", section.__doc__ or "", "")
    yield from ("| key | value | default | meaning |", "|---|---|---|---|")
    for entry in keys:
        key = f"{prefix}{entry.name}"
        meaning = description(key, documentation[entry.name]).replace("|", "\\|")
        cells = (f"`{key}`", values_of(key, entry, "`{}`".format), _default(entry, defaults), meaning)
        yield f"| {' | '.join(cells)} |"
    yield ""
    for entry in fields(section):
        inner = defaults.get(entry.name, {})
        if is_dataclass(entry.type):
            yield from _section(entry.type, f"{prefix}{entry.name}.", inner)
        elif SECTIONS in entry.metadata:
            yield from _section(entry.metadata[SECTIONS], f"{prefix}{entry.name}.NAME.", {})


def _default(entry: Field[Any], defaults: Mapping[str, Any]) -> str:
    value = defaults.get(entry.name, entry.default)
    if value is NO_DEFAULT and callable(entry.default_factory):
        value = entry.default_factory()
    if value in (NO_DEFAULT, MISSING, ""):
        return ""
    text = format_value(value)
    return "from the model" if isinstance(value, Mapping) and len(text) > _MAX_MAPPING_CHARACTERS else f"`{text}`"


def with_table(page: str, script: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return the page with the current table between the marks of the script."""
    begin, columns = f"<!-- made by python -m scripts.{script} -->", [*head]
    before, _, rest = (DOCS / page).read_text("utf-8").partition(begin)
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"{before}{begin}\n", *lines, f"\n{_END}{rest.partition(_END)[2]}"])


def coming_from_page() -> str:
    """Return the page with the names of settings in other programs."""
    rows = (
        [
            f"`{row['here']}`" if "here" in row else "not supported",
            *(_names(row, program) for program in _PROGRAMS),
            row.get("remark", ""),
        ]
        for row in other_programs()
    )
    return with_table(
        "coming-from.md", "make_keys", ("setting", *_PROGRAMS.values(), "remark"), [*rows, *_not_needed()]
    )


def _not_needed() -> Iterator[list[str]]:
    """Yield a row for each reason why settings have no effect on training."""
    reasons = {program: PROGRAMS[program]["not_needed"] if program in PROGRAMS else {} for program in _PROGRAMS}
    for reason in dict.fromkeys(reason for table in reasons.values() for reason in table):
        groups = [table.get(reason, "").split() for table in reasons.values()]
        names = (", ".join(f"`{name.replace('=', ': ')}`" for name in group) for group in groups)
        yield ["not needed", *names, f"{reason[:1].upper()}{reason[1:]}."]


def hardware_page() -> str:
    """Return the page with the GPUs of conf/hardware."""
    rates = (f"{precision}, dense" for precision in ("bf16, or fp16 without bf16", "tf32", "fp32", "fp8"))
    head = ("`hardware=`", "GPU", "memory", "bandwidth", *rates)
    rows = (
        [
            f"`{gpu.name}`",
            gpu.label,
            f"{gpu.memory_gib:g} GiB",
            f"{gpu.bandwidth_gb:g} GB/s",
            *(
                f"{rate:g} TFLOPS" if rate else ""
                for rate in (gpu.bf16_tflops or gpu.fp16_tflops, gpu.tf32_tflops, gpu.fp32_tflops, gpu.fp8_tflops)
            ),
        ]
        for gpu in all_hardware()
    )
    return with_table("check.md", "make_keys", head, rows)


def _names(row: Mapping[str, Any], program: str) -> str:
    """Return the names in a program, with values as in its files."""
    sign = "=" if program in ("trl", "others") else ": "
    return ", ".join(f"`{name.replace('=', sign)}`" for name in row.get(program, ()))


PAGES = {DOCS / "keys.md": keys_page, DOCS / "coming-from.md": coming_from_page, DOCS / "check.md": hardware_page}

if __name__ == "__main__":
    for file, page in PAGES.items():
        file.write_text(page(), encoding="utf-8")
