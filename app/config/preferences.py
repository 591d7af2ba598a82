"""Facts of preference losses for schema, rules and messages; `app/tasks/preference.py` computes the losses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreferenceKind:
    """Task, reference model and recipe of a preference loss."""

    task: str = "preference"
    has_reference: bool = True  # whether rewards are relative to the model before step 1
    has_recipe: bool = False  # whether a file of conf/recipe has its name


PREFERENCE_KINDS: Mapping[str, PreferenceKind] = {
    "none": PreferenceKind(task="", has_reference=False),
    "dpo": PreferenceKind(has_recipe=True),
    "robust": PreferenceKind(),
    "ipo": PreferenceKind(),
    "orpo": PreferenceKind(has_reference=False, has_recipe=True),
    "simpo": PreferenceKind(has_reference=False, has_recipe=True),
    "kto": PreferenceKind(task="preference_label", has_recipe=True),
}
_MOST_WEIGHT_OF_WANTED = 4 / 3  # of all wanted answers together over that of the unwanted ones: Eq. 8 of KTO's paper


def recipes_of(task: str) -> tuple[str, ...]:
    """Return the recipes of a task's preference losses."""
    return tuple(f"recipe={name}" for name, kind in PREFERENCE_KINDS.items() if kind.task == task and kind.has_recipe)


def balance_notes(weights: Mapping[str, float], rows: Mapping[str, int]) -> Iterator[str]:
    """A note where one label outweighs the other; `weights` by the key that sets them, `rows` by label."""
    (wanted, desirable), (unwanted, undesirable) = zip(("true", "false"), weights.values(), strict=True)
    total, against = rows.get(wanted, 0) * desirable, rows.get(unwanted, 0) * undesirable
    if not total or not against or 1 <= total / against <= _MOST_WEIGHT_OF_WANTED:
        return
    up, down = weights
    key, value = (up, against / rows[wanted]) if total < against else (down, total / rows[unwanted])
    yield (
        f"{rows[wanted]:,} wanted and {rows[unwanted]:,} unwanted answers: together the wanted ones weigh "
        f"{total / against:.2f} times as much as the others, and KTO's paper advises 1 to 1.33. {key}={value:.3g} "
        "makes it 1"
    )
