"""The page of app.check: what a run would learn from and what it needs, what would stop it, what could be better."""

from collections.abc import Mapping
from typing import Any

from app.pages.check_summary import cluster_sections, counted_processes, data_sections, memory_sections
from app.pages.render import render


def check_page(found: Mapping[str, Any]) -> str:
    """From what check.json holds: `data`, `memory`, `cluster`."""
    data, memory, cluster = (found.get(name) for name in ("data", "memory", "cluster"))
    stops = [str(problem) for facts in found.values() for problem in facts["stops"]]
    badges = [("a run would stop", "bad") if stops else ("nothing stops a run", "good")]
    sections = data_sections(data) if data else []
    if memory:
        fits = ("fits", "good") if memory["fits"] else ("does not fit", "bad")
        badges.append((f"{fits[0]} {memory['label']}", fits[1]))
        sections += memory_sections(memory)
    if cluster:
        sections += cluster_sections(cluster)
    name = data["source"] if data else memory["subject"] if memory else counted_processes(cluster or {})
    notes = [("bad", problem) for problem in stops]
    return render(
        "check", title=f"Check: {name}", name=str(name), badges=badges, notes=notes, sections=sections
    )
