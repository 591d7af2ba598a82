"""Losses over answers, as facts that the schema, rules and messages share; `app/model/preference.py` computes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreferenceKind:
    """The task that reads the rows of a loss, and whether rewards are relative to the model before step 1."""

    task: str = "preference"
    has_reference: bool = True


PREFERENCE_KINDS: Mapping[str, PreferenceKind] = {
    "none": PreferenceKind(task="", has_reference=False),
    "dpo": PreferenceKind(),
    "robust": PreferenceKind(),
    "ipo": PreferenceKind(),
    "orpo": PreferenceKind(has_reference=False),
    "simpo": PreferenceKind(has_reference=False),
    "kto": PreferenceKind(task="preference_label"),
}
_MOST_WEIGHT_OF_WANTED = 4 / 3  # of all wanted answers together over that of the unwanted ones: Eq. 8 of KTO's paper


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
