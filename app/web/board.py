"""Pages and actions of the board, and its server on the loopback address."""

import asyncio
import secrets
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import uvicorn
from jinja2 import ChoiceLoader, FileSystemLoader
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, UploadFile
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
from app.web.form import NUMBERS, defaults_of, is_sweep, options, proposed_name, settings_of
from app.web.live import Live, live_view, log_of
from app.web.runs import Runs, command, shown
from app.web.uploads import MAX_UPLOAD_BYTES, SUFFIXES, check_upload_size, save_upload, upload_path

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
            Route("/form.js", lambda _: FileResponse(_HERE / "form.js")),
            Route("/new", self._new, methods=["POST"]),
            Route("/command", self._command, methods=["POST"]),
            Route("/compare", self._compare),
            Route("/sweep/{name}", self._sweep),
            Route("/sweep/{name}/report", self._sweep_report),
            Route("/sweep/{name}/stop", partial(self._act_on_sweep, self._runs.stop), methods=["POST"]),
            Route("/sweep/{name}/resume", partial(self._act_on_sweep, self._runs.start), methods=["POST"]),
            Route("/run/{name:path}/ask", self._ask, methods=["POST"]),
            Route("/run/{name:path}/stop", partial(self._act, self._runs.stop), methods=["POST"]),
            Route("/run/{name:path}/resume", partial(self._act, self._runs.start), methods=["POST"]),
            Route("/run/{name:path}/report", self._run_report),
            Route("/run/{name:path}/chat", self._chat),
            Route("/run/{name:path}", self._run),
        ]
        application = Starlette(routes=routes, exception_handlers={AppError: self._refused}, lifespan=lifespan)
        application.router.redirect_slashes = False
        return application

    def _list(self, _: Request) -> Response:
        """Return the list of runs and sweeps, and an empty form."""
        return self._page("list", rows=self._runs.rows(), **self._form({}))

    def _form(self, sent: Mapping[str, str], problem: str = "", trials: int = 0) -> dict[str, Any]:
        """Return the values of the form: its fields as sent, their defaults, and the command."""
        settings, proposed = settings_of(sent), proposed_name(sent, self._runs.taken_names())
        what, name = sent.get("what"), sent.get("name", proposed)
        words = command("check", what, *settings) if what in CHECKS else self._runs.command(name, settings)
        return {
            "sent": defaultdict(str, sent),
            "options": options(),
            "numbers": NUMBERS,
            "defaults": defaultdict(str, defaults_of(settings)),
            "proposed": proposed,
            "suffixes": ",".join(SUFFIXES),
            "max_bytes": MAX_UPLOAD_BYTES,
            "command": shown(words),
            "problem": problem,
            "trials": trials,
        }

    def _run(self, request: Request) -> Response:
        name, folder = self._named(request, self._runs.folders())
        row, has_files = self._runs.row(name), is_run(folder)
        with _reporting_damage():
            live = live_view(folder, row["stamp"]) if has_files else Live()
        commands = {
            "Full report": has_files and shown(command("report", f"run={folder}")),
            "Resume": row["action"] == "resume" and shown(self._runs.command(name)),
            "Stop": self._runs.stop_command(name),
            "Chat": (folder / "final").is_dir() and shown(command("generate", f"run={folder}")),
        }
        values = {"has_files": has_files, "log": self._runs.log(name) or log_of(folder), **self._chat_of(name, folder)}
        return self._page("run", row=row, live=live, commands=commands, **values)

    def _run_report(self, request: Request) -> Response:
        _, folder = self._named(request, self._runs.folders())
        if not is_run(folder):
            raise HTTPException(404)
        return _standalone(lambda: run_page(folder))

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
        with _reporting_damage():
            row, trials = self._runs.sweep_row(name, content), self._runs.trial_rows(name, content)
        problem = ""
        commands = {
            "Report": content and shown(command("report", f"sweep={folder}")),
            "Stop": self._runs.stop_command(name),
        }
        if row["action"] == "resume":
            try:
                commands["Resume"] = shown(self._runs.command(name))
            except AppError as refusal:  # settings of a received sweep.json
                row["action"], problem = None, refusal.report()
        values: dict[str, Any] = {"row": row, "trials": trials, "commands": commands, "problem": problem}
        return self._page("sweep", has_report=bool(content), log=self._runs.log(name), **values)

    def _sweep_report(self, request: Request) -> Response:
        _, (folder, content) = self._named(request, self._runs.sweeps())
        if not content:
            raise HTTPException(404)
        return _standalone(lambda: sweep_page(folder, content, folder.parent / "board.html"))

    async def _new(self, request: Request) -> Response:
        """Start or check a run, or start a sweep."""
        sent, problem, _ = await self._checked_form(request)
        settings, what, name = settings_of(sent), sent["what"], sent["name"]
        if problem:
            values = await asyncio.to_thread(self._form, sent, problem)
            return self._page("list", 400, rows=self._runs.rows(), **values)
        if what in CHECKS:
            words = command("check", what, *settings)
            return self._framed(f"check {what}", words, *await _checked(words))
        self._runs.start(name, settings)
        return RedirectResponse(f"/{'sweep' if is_sweep(settings) else 'run'}/{quote(name)}", 303)

    async def _command(self, request: Request) -> Response:
        """Return the form with its command, its problems and the defaults of its fields."""
        sent, problem, trials = await self._checked_form(request)
        return self._page("form", **await asyncio.to_thread(self._form, sent, problem, trials))

    async def _checked_form(self, request: Request) -> tuple[dict[str, str], str, int]:
        """Return the fields of a form, the report of all their problems, and the number of runs."""
        sent, problems = await self._sent(request)
        count = 0
        try:
            count = await asyncio.to_thread(self._runs.check, settings_of(sent), sent["what"], sent["name"])
        except AppError as error:
            problems += error.problems
        return sent, ConfigError(problems).report() if problems else "", count

    async def _sent(self, request: Request) -> tuple[dict[str, str], list[str]]:
        """Return the fields as text and the problems of an upload, whose saved file becomes the dataset."""
        check_upload_size(request.headers.get("content-length"))
        folder, problems = self._runs.folder, list[str]()
        async with request.form() as form:
            sent = {key: value.strip() for key, value in form.items() if isinstance(value, str)}
            upload, sent["what"] = form.get("upload"), sent.get("what", "")
            try:
                if isinstance(upload, UploadFile) and upload.filename:
                    path = await asyncio.to_thread(save_upload, folder, upload.filename, upload.file)
                    sent |= {"dataset": "auto", "dataset.path": str(path)}
                elif isinstance(upload, str) and upload:  # the name of a file that is not sent yet
                    sent |= {"dataset": "auto", "dataset.path": str(upload_path(folder, upload))}
            except AppError as error:
                problems += error.problems
        sent["name"] = sent.get("name") or proposed_name(sent, self._runs.taken_names())
        return sent, problems

    async def _act_on_sweep(self, action: Callable[[str], None], request: Request) -> Response:
        name, _ = self._named(request, self._runs.sweeps())
        action(name)
        return RedirectResponse(f"/sweep/{quote(name)}", 303)

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


def _standalone(make: Callable[[], Page]) -> Response:
    """Return a report as a page of its own, which neither runs scripts nor sends forms."""
    return HTMLResponse(_report(make), headers={"Content-Security-Policy": _REPORT_POLICY})


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
