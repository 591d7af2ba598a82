"""The nearest valid name, for whoever mistyped one."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_SHOWN = 12


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The one name that was probably meant; a right first letter makes up for much."""
    by_lower = {name.lower(): name for name in sorted(names)}
    initial = [name for name in by_lower if name[:1] == given[:1].lower()]
    near = get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6) or get_close_matches(
        given.lower(), initial, n=1, cutoff=0.4
    )
    return by_lower[near[0]] if near else None


def nearest_keys(given: str, keys: Iterable[str]) -> list[str]:
    """The keys that were probably meant: nearly the same, or of the same last part, or near it in the same section."""
    known = sorted(keys)
    section, _, leaf = given.rpartition(".")
    nearly_equal = get_close_matches(given, known, n=1, cutoff=0.88)
    if nearly_equal:
        return nearly_equal
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    if same_leaf:
        return sorted(same_leaf, key=lambda key: -SequenceMatcher(None, given, key).ratio())[:3]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = nearest(leaf, siblings)
    return [siblings[near]] if near else []


def did_you_mean(given: str, known: Iterable[str], *, listing: bool = True) -> str:
    """` Did you mean x?` when something is near, else (`listing`) the names themselves, as many as fit on a line."""
    names = sorted(known)
    near = nearest(given, names)
    if near:
        return f" Did you mean {near}?"
    listed = ", ".join(names[:_SHOWN]) + (" and more" if len(names) > _SHOWN else "")
    return f" Known: {listed}." if names and listing else ""


def did_you_mean_key(given: str, known: Iterable[str]) -> str:
    """The same for dotted keys: also finds a key by its last part (`lr` is `optimizer.lr`)."""
    keys = sorted(known)
    near = nearest_keys(given, keys)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    section = given.rpartition(".")[0]
    return did_you_mean(given, [key for key in keys if section and key.rpartition(".")[0] == section] or keys)
