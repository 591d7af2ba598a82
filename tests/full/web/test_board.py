"""The board in use: a run is started, watched, stopped, resumed and asked, by a browser or over HTTP."""

import json
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from html import unescape
from pathlib import Path

import pytest

from tests.conftest import _environment_of_processes
from tests.full.web.browser import Browser
from tests.harness.board import Served, served
from tests.harness.marks import requires_chromium
from tests.harness.runs import SMALL, Zygote, numbers, result, wait_until

SETTINGS = (*SMALL, "recipe=lora", "training.epochs=12", "eval.every=40", "checkpoint.every=200")
QUESTION = "Name the opposite of new."


class InBrowser:
    """A person with a mouse: the page refreshes itself."""

    def __init__(self, at: Served, page: Browser) -> None:
        self.at, self.page = at, page
        page.open(at.entry)

    def start(self, name: str, settings: str) -> None:
        self.seen("runs", "No runs yet.")
        self.page.value(f"document.querySelector('[name=name]').value = {name!r}")
        self.page.value(f"document.querySelector('[name=settings]').value = {settings!r}")
        self.page.value("document.querySelector('[value=train]').click()")

    def fill(self, field: str, value: str) -> None:
        """Choose or type a value, as a person does: the page hears of it."""
        self._change(field, f"field.value = {value!r}")

    def upload(self, name: str, text: str) -> None:
        file = f"const files = new DataTransfer(); files.items.add(new File([{text!r}], {name!r}));"
        self._change("upload", f"{file} field.files = files.files")

    def _change(self, field: str, script: str) -> None:
        heard = "field.dispatchEvent(new Event('input', {bubbles: true}))"
        self.page.value(f"{{ const field = document.querySelector('[name=\"{field}\"]'); {script}; {heard} }}")

    def placeholder(self, field: str) -> str:
        return str(self.page.value(f"document.querySelector('[name=\"{field}\"]').placeholder"))

    def press(self, label: str) -> None:
        wait_until(lambda: bool(self.page.value(_click(label))), 60, lambda: f"no button {label}: {self.text()}")

    def ask(self, question: str) -> None:
        self.page.value(f"document.querySelector('[name=question]').value = {question!r}")
        self.press("Chat")

    def text(self) -> str:
        return str(self.page.value("document.title + ' ' + document.querySelector('main').innerText"))

    def seen(self, *words: str) -> None:
        _seen(self.text, words)


def _click(label: str) -> str:
    buttons = "[...document.querySelectorAll('button')]"
    return f"(() => {{ const b = {buttons}.find(b => b.innerText === {label!r}); if (b) b.click(); return !!b }})()"


class OverHttp:
    """The same where there is no browser: forms are read from the page and sent."""

    def __init__(self, at: Served) -> None:
        self.at, self.path = at, "/"

    def start(self, name: str, settings: str) -> None:
        self.seen("runs", "No runs yet.")
        sent = {"name": name, "settings": settings, "what": "train"}
        self.path = self.at.client.post("/new", data=sent).url.path

    def press(self, label: str) -> None:
        form = rf'<form method="post" action="([^"]+)"><button>{label}</button>'
        wait_until(lambda: re.search(form, self._page()) is not None, 60, self.text)
        found = re.search(form, self._page())
        assert found
        self.at.client.post(found[1])

    def ask(self, question: str) -> None:
        self.at.client.post(f"{self.path}/ask", data={"question": question})

    def _page(self) -> str:
        return self.at.client.get(self.path).text

    def text(self) -> str:
        return unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", self._page(), flags=re.DOTALL))

    def seen(self, *words: str) -> None:
        _seen(self.text, words)


def _seen(text: Callable[[], str], words: tuple[str, ...]) -> None:
    def are_there() -> bool:
        time.sleep(0.1)
        return all(word in shown for shown in (" ".join(text().split()),) for word in words)

    wait_until(are_there, 90, lambda: f"{words}: {text()}")


@pytest.mark.parametrize(
    "has_browser",
    [
        pytest.param(True, marks=requires_chromium, id="browser"),
        pytest.param(False, marks=pytest.mark.skipif("program('chromium')", reason="a browser does it"), id="http"),
    ],
)
def test_run_started_stopped_and_resumed_ends_as_undisturbed(has_browser: bool, zygote: Zygote, tmp_path: Path) -> None:
    folder, whole = tmp_path / "runs", tmp_path / "whole"
    folder.mkdir()
    zygote.finish(tmp_path, *SETTINGS, f"output_dir={whole}")
    opened: AbstractContextManager[Browser | None] = Browser(tmp_path / "browser") if has_browser else nullcontext()
    with served(folder, _environment_of_processes(), tmp_path / "stderr") as at, opened as page:
        user = OverHttp(at) if page is None else InBrowser(at, page)
        user.start("mine", "\n".join(SETTINGS))
        user.seen("mine still running", "of 156", "gradient norm")
        user.press("Stop")
        user.seen("mine stopped")
        assert result(folder / "mine")["steps"] < result(whole)["steps"]
        user.press("Resume")
        user.seen("mine finished", "step 156 of 156", "Chat")
        assert numbers(folder / "mine") == numbers(whole)
        assert result(folder / "mine")["train_loss_last"] == result(whole)["train_loss_last"]
        user.ask(QUESTION)
        answer = zygote.run(tmp_path, f"run={whole}", f"prompt={QUESTION}", module="app.generate").stdout.strip()
        user.seen(QUESTION, answer)
        assert _generating(folder)
        if page is not None:
            _answer_grows_and_stops(page)
            base = at.entry.partition("?")[0]
            assert [each for each in page.asked if not each.startswith((base, "about:", "data:"))] == []
    assert not _generating(folder), "the chat ends with the board"


@requires_chromium
def test_form_shows_its_command_and_starts_a_sweep_of_an_upload(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    rows = "".join(f'{{"question": "What is {n}?", "answer": "{n % 7}"}}\n' for n in range(90))
    fields = {"model": "", "dataset": "auto", "training.epochs": "12", "optimizer.lr": "1e-3,1e-2"}
    fields |= {"dataset.max_length": "64"}
    others = ("training.epochs", "dataset.", "eval.every", "checkpoint.every")
    settings = [*(text for text in SMALL if not text.startswith(others)), "eval.every=40", "checkpoint.every=200"]
    with served(folder, _environment_of_processes(), tmp_path / "stderr") as at, Browser(tmp_path / "browser") as page:
        user = InBrowser(at, page)
        user.seen("No runs yet.", "train output_dir=")
        user.fill("model", "qwen")
        user.fill("recipe", "qlora")
        user.seen("train recipe=qlora model=qwen output_dir=", "/qwen-qlora")
        assert [user.placeholder(field) for field in ("dataset.max_length", "name")] == ["2048", "qwen-qlora"]
        user.fill("optimizer.lr", "abc")
        user.seen("optimizer.lr=abc: expected a number.")
        for field, value in fields.items():
            user.fill(field, value)
        user.upload("rows 1.jsonl", rows)
        user.fill("settings", "\n".join(settings))
        path = folder / "uploads" / "rows_1.jsonl"
        typed = f"dataset.path={path} training.epochs=12 optimizer.lr=1e-3,1e-2 dataset.max_length=64"
        user.seen("Sweep of 2 runs", typed)
        assert not path.exists()
        user.press("Start")
        user.seen("tiny-qlora still running", "of 2 trials", "step ")
        assert path.read_text() == rows
        user.press("Stop")
        user.seen("tiny-qlora stopped", "Resume")
        trials = json.loads((folder / "tiny-qlora" / "sweep.json").read_text())["trials"]
        assert "stopped" in [trial["status"] for trial in trials]
        user.press("Resume")
        user.seen("tiny-qlora finished", "2 of 2 trials", "best eval loss")
        page.value("document.querySelector('#rows a').click()")
        user.seen("tiny-qlora/1-optimizer.lr=0.001 finished")
        base = at.entry.partition("?")[0]
        assert [address for address in page.asked if not address.startswith((base, "about:", "data:"))] == []


def _generating(folder: Path) -> bool:
    words = f"run={folder / 'mine'}\0prompts=-".encode()
    return any(words in file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline"))


def _answer_grows_and_stops(page: Browser) -> None:
    """The page is changed where an answer grows: not what is open, typed and scrolled to."""
    is_idle = "!document.querySelector('[data-busy]')"
    wait_until(lambda: page.value(is_idle) is True, 60)  # the text of an answer is shown before its end
    page.value("document.querySelector('#settings').open = true; scrollTo(0, 150)")
    page.value("document.querySelector('[name=system]').value = 'Be brief.'")
    page.value("document.querySelector('[name=temperature]').value = '50'")
    page.value("document.querySelector('[name=max_new_tokens]').value = '400'")
    page.value(f"document.querySelector('[name=question]').value = {QUESTION!r}; {_click('Chat')}")
    page.value("document.querySelector('[name=question]').value = 'a draft'")
    has_answer = "document.querySelector('[data-busy]') && document.querySelectorAll('.message').length == 4"
    has_piece = f"{has_answer} && !/^(Loading|[.]{{3}})/.test({_LAST})"
    stopped = f"{has_piece} && {_click('Stop answer')} ? {_LAST} : ''"
    shown = list[str]()

    def has_grown() -> bool:
        shown.append(page.value(stopped) or "")
        return shown[-1] != ""

    wait_until(has_grown, 60, lambda: str(shown[-5:]))
    wait_until(lambda: page.value(is_idle) is True, 60)
    assert page.value(_LAST).startswith(shown[-1])
    assert page.value("document.querySelectorAll('.message').length") == 4
    assert page.value("document.querySelector('#settings').open") is True
    assert page.value("scrollY") == 150
    typed = "[...document.querySelectorAll('#ask :is(input, textarea)')].map(field => field.value)"
    assert page.value(typed) == ["a draft", "Be brief.", "50", "400"]


_LAST = "[...document.querySelectorAll('.message .text')].pop().innerText"
