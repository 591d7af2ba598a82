"""python -m scripts.make_models: write the table of docs/models.md, with estimated memory by model and recipe."""

from collections.abc import Iterator
from pathlib import Path

from app.base.base_model import BaseModel
from app.config.commands import all_hardware
from app.config.conf_files import choices_by_group
from app.config.load import compose_run
from app.config.tasks import task_of
from app.errors import ConfigError
from app.memory.estimate import check_fit, machine_of
from app.memory.planner import Planner

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
_MARKS = ("<!-- made by python -m scripts.make_models -->", "<!-- end -->")
RECIPES = ("recipe=lora", "recipe=lora quantization=int8", "recipe=qlora")
UNKNOWN = "numbers unknown"
_ENCODERS = ("bert", "bert_large", "modernbert")
_MASKED = ("dataset=text", "dataset.path=book.txt", "task=masked", "batching.packing=false")


def models() -> list[str]:
    """Return the choices of `model=` that are models on the Hub."""
    return [name for name in choices_by_group()["model"] if name not in ("folder", "tiny")]


def row_of(name: str) -> str:
    """Return a table row: ID, parameters, and for each recipe the peak memory and the smallest GPU with bf16 for it."""
    words = [f"model={name}", *(_MASKED if name in _ENCODERS else ())]
    model = compose_run(words).model
    if not model.architecture:
        return f"| `{name}` | {model.path} | {UNKNOWN} |" + " |" * len(RECIPES)
    words.append("model.weights=random")
    run = compose_run(words)
    words += ["training.recompute=true"] if run.model.suggest.recompute == "auto" else []
    count = sum(weight.numel() for weight in BaseModel(run.model, task_of(run.task)).on_meta().parameters())
    cells = (_plan([*words, *recipe.split()]) for recipe in RECIPES)
    return f"| `{name}` | {model.path} | {count / 1e9:.2f}B | {' | '.join(cells)} |"


def _plan(words: list[str]) -> str:
    cards = sorted(map(machine_of, all_hardware()), key=lambda card: card.memory_bytes)
    try:
        plan = Planner(cards[-1], 1).at(compose_run([*words, "precision=bf16"])).plan
    except ConfigError:
        return "not supported"
    fits = (card.label for card in cards if not card.before_ampere and check_fit(plan, card).fits)
    return f"{plan.peak_bytes / 1e9:.1f} GB, {next(fits, 'no single GPU')}"


def page() -> str:
    """Return the page with the current table between its marks."""
    begin, end = _MARKS
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    return "\n".join([f"{before}{begin}\n", *_table(), f"\n{end}{rest.partition(end)[2]}"])


def _table() -> Iterator[str]:
    head = ("`model=`", "Hub ID", "parameters", *(f"`{recipe}`" for recipe in RECIPES))
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from map(row_of, models())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
