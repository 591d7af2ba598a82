"""Server on the loopback address: the printed address with its token, and who may ask."""

import secrets
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import EnvironmentProblem, gist
from app.web.board import Board

_HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'self'; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(folder: Path, port: int) -> None:
    """Serve the board of a folder until a signal."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of connections that have just ended
        try:
            listener.bind((_HOST, port))
            listener.listen()
        except OSError as fault:
            raise EnvironmentProblem(f"port={port}: {gist(fault)}. Give another port, or leave it out.") from fault
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        app = guarded(Board(folder).application(), port, token)
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=2)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again after its own end
        # no Console: it would mask the token
        sys.stdout.write(f"board   {folder}  http://{_HOST}:{port}/?token={token}\n")
        sys.stdout.write("Ctrl-C ends the board; runs that it started go on\n")
        sys.stdout.flush()
        uvicorn.Server(config).run(sockets=[listener])


def guarded(app: ASGIApp, port: int, token: str) -> ASGIApp:
    """The application for requests with the token alone, to this host (DNS rebinding), and if they change something,
    from its own pages (cross-site request forgery).
    """
    hosts, cookie = (f"{_HOST}:{port}", f"localhost:{port}"), f"board-{port}"  # cookies are of a host, not of a port

    def is_token(given: str | None) -> bool:
        return secrets.compare_digest((given or "").encode(), token.encode())

    def answer_to(request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host not in hosts:
            return PlainTextResponse("This address is not the board's.\n", 403)
        if request.method not in ("GET", "HEAD") and request.headers.get("origin") != f"http://{host}":
            return PlainTextResponse("The board takes this from its own pages alone.\n", 403)
        if request.url.path == "/" and is_token(request.query_params.get("token")):
            entry = RedirectResponse("/", 303)
            entry.set_cookie(cookie, token, httponly=True, samesite="strict")
            return entry
        if not is_token(request.cookies.get(cookie)):
            return PlainTextResponse("Open the address that app.board printed: it has the token.\n", 403)
        return None

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = answer_to(Request(scope)) if scope["type"] == "http" else None
        await (answer or app)(scope, receive, send_with_headers)

    return guard
