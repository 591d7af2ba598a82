"""Pages and actions of the board, and its server on the loopback address."""

import asyncio
import secrets
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import uvicorn
from jinja2 import ChoiceLoader, FileSystemLoader
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config.commands import CHECKS
from app.errors import AppError, CheckpointError, ConfigError, EnvironmentProblem, gist
from app.files import read_json
from app.pages.check_page import check_page
from app.pages.comparison_page import comparison_page, sweep_page
from app.pages.page import PAGE_FAULTS, Page, as_html, environment
from app.pages.read_run import is_run
from app.pages.run_page import run_page
from app.web.chat import OPTIONS, Chat
from app.web.live import Live, live_view, log_of
from app.web.runs import Runs, command, shown

_HERE = Path(__file__).parent / "templates"
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; frame-ancestors 'none'; "
    "base-uri 'none'"
)


class Board:
    """Pages for a folder; names in addresses are looked up among the runs and sweeps of the folder."""

    def __init__(self, folder: Path) -> None:
        self._runs = Runs(folder)
        self._chats: dict[str, Chat] = {}
        reports = environment()
        assert reports.loader is not None
        self._templates = reports.overlay(loader=ChoiceLoader([FileSystemLoader(_HERE), reports.loader]))

    def application(self) -> Starlette:
        """Return the web application, which ends its chats on shutdown."""

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
            Route("/run/{name}/report", self._run_report),
            Route("/run/{name}/chat", self._chat),
            Route("/run/{name}/ask", self._ask, methods=["POST"]),
            Route("/run/{name}/stop", partial(self._act, self._runs.stop), methods=["POST"]),
            Route("/run/{name}/resume", partial(self._act, self._runs.start), methods=["POST"]),
        ]
        application = Starlette(routes=routes, exception_handlers={AppError: self._refused}, lifespan=lifespan)
        application.router.redirect_slashes = False
        return application

    def _list(self, _: Request, status: int = 200, **values: Any) -> Response:
        """Return the list of runs, and the form with rejected input kept."""
        form = {"name": "", "settings": (), "problem": "", "command": "", **values}
        rows = [self._runs.row(name) for name in self._runs.folders()]
        return self._page("list", status, rows=rows, sweeps=self._runs.sweeps(), **form)

    def _run(self, request: Request) -> Response:
        name, folder = self._named(request, self._runs.folders())
        row, has_files = self._runs.row(name), is_run(folder)
        with _reporting_damage():
            live = live_view(folder, row["stamp"]) if has_files else Live()
        action = row["action"] if row["action"] != "resume" or live.resume_helps else None
        commands = {
            "Full report": has_files and shown(command("report", f"run={folder}")),
            "Resume": row["action"] == "resume" and shown(self._runs.command(name)),
            "Stop": self._runs.stop_command(name),
            "Chat": (folder / "final").is_dir() and shown(command("generate", f"run={folder}")),
        }
        values = {"has_files": has_files, "log": self._runs.log(name) or log_of(folder), **self._chat_of(name, folder)}
        return self._page("run", row=row, live=live, action=action, commands=commands, **values)

    def _run_report(self, request: Request) -> Response:
        """Return the report as a page of its own, which neither runs scripts nor sends forms."""
        _, folder = self._named(request, self._runs.folders())
        if not is_run(folder):
            raise HTTPException(404)
        return HTMLResponse(_report(lambda: run_page(folder)), headers={"Content-Security-Policy": _REPORT_POLICY})

    def _chat(self, request: Request) -> Response:
        """Return the chat alone, for the page of the run while an answer grows."""
        return self._page("chat", **self._chat_of(*self._named(request, self._runs.folders())))

    def _chat_of(self, name: str, folder: Path) -> dict[str, Any]:
        words = command("generate", f"run={folder}", "prompts=-")
        chat = self._chats.setdefault(name, Chat(words))
        return {"name": name, "can_ask": (folder / "final").is_dir(), "chat": chat}

    def _compare(self, request: Request) -> Response:
        selected, runs = request.query_params.getlist("run"), self._runs.folders()
        folders = [folder for name, folder in runs.items() if name in selected and is_run(folder)]
        if len(folders) < 2:
            raise ConfigError("Select at least two runs to compare.")
        words = command("report", f"runs={','.join(map(str, folders))}", "to=comparison.html")
        return self._framed(f"{len(folders)} runs", words, _report(lambda: comparison_page(folders)))

    def _sweep(self, request: Request) -> Response:
        name, (folder, content) = self._named(request, self._runs.sweeps())
        page = _report(lambda: sweep_page(folder, content, folder.parent / "board.html"))
        return self._framed(name, command("report", f"sweep={folder}"), page)

    async def _new(self, request: Request) -> Response:
        """Start or check a run."""
        async with request.form() as form:
            name, what, text = (str(form.get(key, "")) for key in ("name", "what", "settings"))
        settings = [line.strip() for line in text.splitlines() if line.strip()]
        words = command("check", what, *settings) if what in CHECKS else self._runs.command(name, settings)
        try:
            await asyncio.to_thread(self._runs.check, settings, what, name)
        except AppError as error:
            values = {"name": name, "settings": settings, "problem": error.report(), "command": shown(words)}
            return self._list(request, 400, **values)
        if what not in CHECKS:
            self._runs.start(name, settings)
            return RedirectResponse(f"/run/{quote(name)}", 303)
        return self._framed(f"check {what}", words, *await _checked(words))

    async def _act(self, action: Callable[[str], None], request: Request) -> Response:
        action(self._named(request, self._runs.folders())[0])
        return _back(request)

    async def _ask(self, request: Request) -> Response:
        """Ask a question and wait for the answer, stop the answer in progress, or start a new conversation."""
        name, folder = self._named(request, self._runs.folders())
        async with request.form() as form:
            values = {key: str(value).replace("\r\n", "\n").strip() for key, value in form.items()}
        chat = self._chat_of(name, folder)["chat"]
        if "new" in values:
            await chat.clear()
        elif "stop" in values:
            await chat.stop()
        elif values.get("question"):
            await chat.ask(values["question"], {key: values[key] for key in OPTIONS if key in values})
        return _back(request)

    def _named(self, request: Request, values: dict[str, Any]) -> tuple[str, Any]:
        name: str = request.path_params["name"]
        if name not in values:
            raise HTTPException(404)
        return name, values[name]

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
    with _reporting_damage():
        return as_html(make())


@contextmanager
def _reporting_damage() -> Iterator[None]:
    try:
        yield
    except PAGE_FAULTS as fault:
        raise CheckpointError(
            f"A file is damaged ({type(fault).__name__}: {fault}). Restore it from a copy."
        ) from fault


async def _checked(words: list[str]) -> tuple[str, str]:
    """Run a check, and return its page; if there is none, return its output."""
    with TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *words, f"output_dir={folder}", stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        try:
            printed, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()  # if the board ends first
        file = Path(folder) / "check.json"
        return (as_html(check_page(read_json(file))), "") if file.is_file() else ("", printed.decode(errors="replace"))


# ---- server


_HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'self'; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(folder: Path, port: int) -> None:
    """Serve the board of a folder until a signal arrives."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of recent connections too
        try:
            listener.bind((_HOST, port))
            listener.listen()
        except OSError as fault:
            raise EnvironmentProblem(f"port={port}: {gist(fault)}. Set another port, or leave it out.") from fault
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        app = guarded(Board(folder).application(), port, token)
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=2)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again after its shutdown
        # no Console: it would mask the token
        sys.stdout.write(f"board   {folder}  http://{_HOST}:{port}/?token={token}\n")
        sys.stdout.write("Ctrl-C stops the board; runs started from it keep running\n")
        sys.stdout.flush()
        uvicorn.Server(config).run(sockets=[listener])


def guarded(app: ASGIApp, port: int, token: str) -> ASGIApp:
    """Return the application restricted to requests with the token, to this host (against DNS rebinding) and, if they
    change something, from pages of the board (against cross-site request forgery).
    """
    hosts, cookie = (f"{_HOST}:{port}", f"localhost:{port}"), f"board-{port}"  # cookies belong to a host, not to a port

    def is_token(value: str | None) -> bool:
        return secrets.compare_digest((value or "").encode(), token.encode())

    def answer_to(request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host not in hosts:
            return PlainTextResponse("Wrong host in the board address.\n", 403)
        if request.method not in ("GET", "HEAD") and request.headers.get("origin") != f"http://{host}":
            return PlainTextResponse("Only requests from pages of the board are accepted.\n", 403)
        if request.url.path == "/" and is_token(request.query_params.get("token")):
            entry = RedirectResponse("/", 303)
            entry.set_cookie(cookie, token, httponly=True, samesite="strict")
            return entry
        if not is_token(request.cookies.get(cookie)):
            return PlainTextResponse("Open the address printed by finetune board; it contains the token.\n", 403)
        return None

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({**_HEADERS, **headers})  # a response may be stricter
            await send(message)

        answer = answer_to(Request(scope)) if scope["type"] == "http" else None
        await (answer or app)(scope, receive, send_with_headers)

    return guard
