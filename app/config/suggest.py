"""The nearest valid name, for whoever mistyped one."""

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 12


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` Did you mean x?` when something is near, else the names themselves when they fit on a line."""
    names = sorted(known)
    near = get_close_matches(given, names, n=1, cutoff=0.6)
    if not near:
        initial = [name for name in names if name[:1] == given[:1]]
        near = get_close_matches(given, initial, n=1, cutoff=0.4)
    if near:
        return f" Did you mean {near[0]}?"
    listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f" Known: {listed}." if names else ""


def did_you_mean_key(given: str, known: Iterable[str]) -> str:
    """The same for dotted keys: also finds a key by its last part (`lr` is `optimizer.lr`)."""
    keys = sorted(known)
    section, _, leaf = given.rpartition(".")
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    if same_leaf:
        return f" Did you mean {' or '.join(same_leaf[:3])}?"
    siblings = [key for key in keys if section and key.rpartition(".")[0] == section]
    if siblings:
        by_leaf = {key.rpartition(".")[2]: key for key in siblings}
        near = get_close_matches(leaf, by_leaf, n=1, cutoff=0.4)
        if near:
            return f" Did you mean {by_leaf[near[0]]}?"
        return did_you_mean(given, siblings)
    return did_you_mean(given, keys)
