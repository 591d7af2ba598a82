"""A verified export becomes a repository of the hub, here one that serves on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import AppError, EnvironmentProblem
from app.exports.destination import repository
from tests.exports.fake_hub import FakeHub
from tests.harness.runs import FinishedRuns, Zygote

TO_HUB = "tests.exports.to_hub"
TOKEN = "hf_" + "a1B2c3D4" * 4


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """This process speaks to it."""
    from huggingface_hub import constants

    served = FakeHub()
    for name, value in (("ENDPOINT", served.address), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield served
    served.close()


def test_pushed_repository_is_private_and_holds_the_export(
    hub: FakeHub, finished: FinishedRuns, tmp_path: Path, quick_zygote: Zygote
) -> None:
    env = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    out = tmp_path / "out"
    words = (f"run={finished('lora')}", "kind=adapter", f"to={out}", "push=me/mine")
    ended = quick_zygote.run(tmp_path, *words, module=TO_HUB, code=0, **env)
    assert f"pushed  {hub.address}/me/mine, private" in ended.stdout
    assert hub.private == {"me/mine": True}
    sent = {name: content for name, content in hub.files.items() if name != ".gitattributes"}
    assert sent == {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert json.loads(sent["export.json"])["passed"]
    assert TOKEN in hub.tokens
    written = [file.read_bytes() for file in out.rglob("*") if file.is_file()]
    assert not [each for each in (*written, ended.stdout.encode(), ended.stderr.encode()) if TOKEN.encode() in each]

    # again, with other files: those of before go, and what the hub has is not sent
    before = len(hub.stored)
    (out / "README.md").write_text("---\nlicense: mit\n---\n")
    (out / "adapter_config.json").unlink()
    repository("me/mine", private=True).push(out, "again")
    assert hub.files["README.md"].startswith(b"---\nlicense: mit")
    assert "adapter_config.json" not in hub.files
    assert len(hub.stored) == before


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("mine", {}, "push=mine: not a repository name. Set push=USER/NAME."),
        ("a/b/c", {}, "push=a/b/c: not a repository name. Set push=USER/NAME."),
        ("me/-x", {}, "push=me/-x: not a repository name ("),
        ("me/..", {}, "push=me/..: not a repository name ("),
        ("../x", {}, "push=../x: not a repository name ("),
        (f"me/{'x' * 300}", {}, ": not a repository name ("),
        ("me/x.git", {}, "push=me/x.git: not a repository name ("),
        ("me/mine", {"role": "read"}, "push=me/mine: the token is read-only."),
        ("other/mine", {}, "has no write access to other. Set push=me/NAME."),
        ("team/mine", {"orgs": {"team": "read"}}, "has no write access to team."),
        (
            "me/mine",
            {"files": {"model.bin": b""}},
            "finetune export did not create this repository (it has model.bin). Set another name",
        ),
        (
            "me/mine",
            {"files": {"export.json": b""}, "public": True},
            "this repository is public, so the export would be",
        ),
        ("me/mine", {"known": False}, "push=me/mine: "),
    ],
)
def test_push_that_cannot_be_is_refused_before_the_export(
    hub: FakeHub, name: str, change: dict[str, object], why: str
) -> None:
    for key, value in change.items():
        setattr(hub, key, value)
    with pytest.raises(AppError) as refusal:
        repository(name, private=True)
    assert why in refusal.value.report()
    assert TOKEN not in refusal.value.report()
    assert hub.private == {}


@pytest.mark.parametrize("path", ["/api/whoami-v2", "/api/models/me/mine"])
@pytest.mark.parametrize("body", [b"<html>", b"[]", b"5", b'{"orgs": [{}]}', b'{"siblings": 5}'])
def test_repository_with_unexpected_answer_of_the_hub_is_refused(hub: FakeHub, path: str, body: bytes) -> None:
    hub.broken[path] = body
    with pytest.raises(EnvironmentProblem, match=r"^push=me/mine: unexpected response from the hub \(.*HF_ENDPOINT"):
        repository("me/mine", private=True)


def test_push_with_unexpected_answer_of_the_hub_keeps_the_export(hub: FakeHub, tmp_path: Path) -> None:
    hub.broken["/api/repos/create"] = b"[]"
    with pytest.raises(
        EnvironmentProblem, match=r"unexpected response .* The verified export is in .*\. To upload it: hf up"
    ):
        repository("me/mine", private=True).push(tmp_path, "first")


def test_push_of_a_team_that_may_write_is_taken(hub: FakeHub) -> None:
    hub.orgs = {"team": "write"}
    assert repository("team/mine", private=False).name == "team/mine"


def test_push_without_a_token_is_refused_first(finished: FinishedRuns, tmp_path: Path, zygote: Zygote) -> None:
    env = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    words = (f"run={finished('lora')}", "kind=adapter", f"to={tmp_path}/out", "push=me/mine")
    said = "push=me/mine: no token for the hub. Set HF_TOKEN, or log in: hf auth login."
    zygote.refused(tmp_path, *words, module=TO_HUB, message=said, **env)
    assert not (tmp_path / "out").exists()
