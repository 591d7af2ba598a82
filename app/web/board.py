"""Pages and actions of the board. A report is that of app.pages, in a frame; an action is a command, which is shown."""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from jinja2 import ChoiceLoader, FileSystemLoader
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from app.config.commands import CHECKS
from app.errors import AppError, CheckpointError, ConfigError
from app.files import read_json
from app.pages.check_page import check_page
from app.pages.comparison_page import comparison_page, sweep_page
from app.pages.page import PAGE_FAULTS, Page, as_html, environment
from app.pages.read_run import is_run
from app.pages.run_page import run_page
from app.web.chat import Chat
from app.web.runs import Runs, command, shown

_HERE = Path(__file__).parent / "templates"


class Board:
    """The pages of a folder. A name in an address is looked up among those of the folder."""

    def __init__(self, folder: Path) -> None:
        self._runs = Runs(folder)
        self._chats: dict[str, Chat] = {}
        reports = environment()
        assert reports.loader is not None
        self._templates = reports.overlay(loader=ChoiceLoader([FileSystemLoader(_HERE), reports.loader]))

    def application(self) -> Starlette:
        """The web application, which ends its chats with itself."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.gather(*(chat.end() for chat in self._chats.values()))

        routes = [
            Route("/", self._list),
            Route("/board.js", lambda _: FileResponse(_HERE / "board.js")),
            Route("/new", self._new, methods=["POST"]),
            Route("/compare", self._compare),
            Route("/sweep/{name}", self._sweep),
            Route("/run/{name}", self._run),
            Route("/run/{name}/ask", self._ask, methods=["POST"]),
            Route("/run/{name}/stop", partial(self._act, self._runs.stop), methods=["POST"]),
            Route("/run/{name}/resume", partial(self._act, self._runs.start), methods=["POST"]),
        ]
        made = Starlette(routes=routes, exception_handlers={AppError: self._refused}, lifespan=lifespan)
        made.router.redirect_slashes = False
        return made

    def _list(self, _: Request, status: int = 200, **values: Any) -> Response:
        """The list with the form, which keeps what was typed where that was refused."""
        given = {"name": "", "settings": (), "problem": "", "command": "", **values}
        rows = [self._runs.row(name) for name in self._runs.folders()]
        return self._page("list", status, rows=rows, sweeps=self._runs.sweeps(), **given)

    def _run(self, request: Request) -> Response:
        name, folder = self._named(request, self._runs.folders())
        row, can_ask = self._runs.row(name), (folder / "final").is_dir()
        commands = {
            "its page": is_run(folder) and shown(command("report", f"run={folder}")),
            "resume": row["action"] == "resume" and shown(self._runs.command(name)),
            "stop": self._runs.stop_command(name),
            "ask": can_ask and shown(command("generate", f"run={folder}")),
        }
        is_new = request.query_params.get("seen") != row["stamp"]
        report = (_report(lambda: run_page(folder)) if is_new else "") if is_run(folder) else None
        log, chat = self._runs.log(name), self._chats.get(name)
        return self._page("run", row=row, commands=commands, report=report, log=log, can_ask=can_ask, chat=chat)

    def _compare(self, request: Request) -> Response:
        marked, known = request.query_params.getlist("run"), self._runs.folders()
        folders = [folder for name, folder in known.items() if name in marked and is_run(folder)]
        if len(folders) < 2:
            raise ConfigError("A comparison needs two runs at least. Mark them in the list.")
        words = command("report", f"runs={','.join(map(str, folders))}", "to=comparison.html")
        return self._framed(f"{len(folders)} runs", words, _report(lambda: comparison_page(folders)))

    def _sweep(self, request: Request) -> Response:
        name, (folder, content) = self._named(request, self._runs.sweeps())
        page = _report(lambda: sweep_page(folder, content, folder.parent / "board.html"))
        return self._framed(name, command("report", f"sweep={folder}"), page)

    async def _new(self, request: Request) -> Response:
        """Start a run, or check what it would do."""
        async with request.form() as form:
            name, what, text = (str(form.get(key, "")) for key in ("name", "what", "settings"))
        settings = [line.strip() for line in text.splitlines() if line.strip()]
        words = command("check", what, *settings) if what in CHECKS else self._runs.command(name, settings)
        try:
            await asyncio.to_thread(self._runs.check, settings, what, name)
        except AppError as wrong:
            values = {"name": name, "settings": settings, "problem": wrong.report(), "command": shown(words)}
            return self._list(request, 400, **values)
        if what not in CHECKS:
            self._runs.start(name, settings)
            return RedirectResponse(f"/run/{quote(name)}", 303)
        return self._framed(f"check {what}", words, *await _checked(words))

    async def _act(self, action: Callable[[str], None], request: Request) -> Response:
        action(self._named(request, self._runs.folders())[0])
        return _back(request)

    async def _ask(self, request: Request) -> Response:
        """Ask a question, or begin a new conversation."""
        name, folder = self._named(request, self._runs.folders())
        async with request.form() as form:
            question, is_new = str(form.get("question", "")).strip(), "new" in form
        chat = self._chats.setdefault(name, Chat(command("generate", f"run={folder}", "prompts=-")))
        if is_new:
            chat.messages.clear()
        elif question:
            await chat.ask(question)
        return _back(request)

    def _named(self, request: Request, known: dict[str, Any]) -> tuple[str, Any]:
        name: str = request.path_params["name"]
        if name not in known:
            raise HTTPException(404)
        return name, known[name]

    def _framed(self, title: str, words: list[str], report: str, printed: str = "") -> Response:
        return self._page("frame", title=title, command=shown(words), report=report, printed=printed)

    def _page(self, template: str, status: int = 200, **values: Any) -> Response:
        page = self._templates.get_template(f"{template}.html.j2")
        return HTMLResponse(page.render(folder=self._runs.folder, **values), status)

    def _refused(self, _: Request, problem: Exception) -> Response:
        assert isinstance(problem, AppError)
        return self._page("refused", 409, problem=problem.report())


def _back(request: Request) -> Response:
    return RedirectResponse(f"/run/{quote(request.path_params['name'])}", 303)


def _report(make: Callable[[], Page]) -> str:
    try:
        return as_html(make())
    except PAGE_FAULTS as fault:
        raise CheckpointError(f"One of its files is not as runs write it ({type(fault).__name__}: {fault}).") from fault


async def _checked(words: list[str]) -> tuple[str, str]:
    """Run a check; returns its page, and what it printed where it wrote no page."""
    with TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *words, f"output_dir={folder}", stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        try:
            printed, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()  # the board ends
        file = Path(folder) / "check.json"
        return (as_html(check_page(read_json(file))), "") if file.is_file() else ("", printed.decode(errors="replace"))
