"""Wording of code, configs and guides: banned words (CONTRIBUTING.md) and vague names."""

import io
import re
import subprocess
import tokenize

from tests.conftest import REPO

BANNED = re.compile(
    r"\b(begun|anew|aloud|heed(?:s|ed)?|needless(?:ly)?|mend(?:s|ed)?|whoever|knobs?"
    r"|in silence|goes on|go on|is told)\b",
    re.IGNORECASE,
)
# keys of check.json, and words to conjugate in the sample data
ALLOWED = {("app/memory/check.py", "knobs"), ("app/pages/check_page.py", "knobs"), ("docs/check.md", "knobs")}
SKIPPED = ("app/assets/", "docs/benchmarks/", "docs/pictures/", "scripts/make_assets/words.yaml")
MAX_EACH = 400  # as a name or a word; a name says what a thing is


def _texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    chosen = [
        name
        for name in listed
        if name.startswith(("app/", "conf/", "docs/", "scripts/"))
        or (name.endswith(".md") and "/" not in name and name != "CONTRIBUTING.md")
    ]
    return {name: (REPO / name).read_text("utf-8", errors="ignore") for name in chosen if not name.startswith(SKIPPED)}


def test_wording_no_banned_words() -> None:
    texts = _texts()
    assert len(texts) > 400
    found = {
        f"{name}:{text[: match.start()].count(chr(10)) + 1}: {match[0]}"
        for name, text in texts.items()
        for match in BANNED.finditer(text)
        if (name, match[0].lower()) not in ALLOWED
    }
    assert found == set()


def test_wording_banned_word_is_found() -> None:
    assert [match[0] for match in BANNED.finditer("The run has begun; it Goes on, knobs and all.")] == [
        "begun",
        "Goes on",
        "knobs",
    ]


def test_names_in_code_are_nouns() -> None:
    sources = [path.read_text("utf-8") for path in sorted((REPO / "app").rglob("*.py"))]
    assert sum(len(re.findall(r"\beach\b", source)) for source in sources) <= MAX_EACH
    vague = {"found", "given", "known", "own", "made", "kept", "told", "wanted", "needless", "begun"}
    names = {
        token.string
        for source in sources
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME
    }
    assert names & vague == set()
