"""Serve the page on this machine only, and refuse requests that come from another site's page."""

import os
import socket
from ipaddress import ip_address
from pathlib import Path

import gradio as gr
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clustrs import embedded
from clustrs.app.loaded_model import LoadedModel, load_warm
from clustrs.app.page import STYLE, build_page, theme
from clustrs.app.results import RunLibrary
from clustrs.models.load import LoadOptions
from clustrs.palette import dark_css

LARGEST_UPLOAD = "20mb"
LARGEST_BODY = 21_000_000
"""Bytes of a request, which has an upload and some text around it."""
LONGEST_QUEUE = 32
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-src 'none'; object-src 'none'"
)
"""Lets a browser load from this server alone, whatever Gradio's page or a stored answer would ask it to load."""


PROXY = "/proxy="
"""A route of Gradio that fetches from other servers."""
NOT_FOUND = PlainTextResponse("not found", 404)


class Guard:
    """ASGI middleware: refuse foreign hosts, foreign origins and large bodies; add the content security policy.

    A page of another site can make a browser send requests to this machine (DNS rebinding gives it even the answers),
    but the browser then names that site in `Host` or `Origin`. `hosts` are the names accepted in `Host`, None for all;
    an `Origin` must be that of the page itself.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = NOT_FOUND if PROXY in scope["path"] else self._refusal(headers)
        if refusal is not None:
            await (_close if scope["type"] == "websocket" else refusal)(scope, receive, send)
            return
        started, received = False, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > LARGEST_BODY:
                raise _BodyTooLarge
            return message

        async def with_policy(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        try:
            await self.app(scope, counted, with_policy)
        except _BodyTooLarge:
            if not started:
                await _too_large(received)(scope, receive, send)
        except (KeyError, IndexError, TypeError, ValueError) as error:  # Gradio's routes trust some fields
            if not started:
                await PlainTextResponse(f"bad request: {type(error).__name__}", 400)(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        host, origin, length = headers.get("host", ""), headers.get("origin"), headers.get("content-length", "0")
        if self.hosts is not None:
            if _host_name(host) not in self.hosts:
                names = ", ".join(sorted(self.hosts))
                return PlainTextResponse(f"Host must be one of {names}, got {host!r}", 403)
            if origin is not None and origin.partition("://")[2] != host:
                return PlainTextResponse(f"Origin must be this page's, {host}, got {origin!r}", 403)
        if length.isdecimal() and len(length) < 20 and int(length) > LARGEST_BODY:
            return _too_large(int(length))
        return None


class _BodyTooLarge(Exception):
    pass


def _too_large(size: int) -> Response:
    return PlainTextResponse(f"a request must have at most {LARGEST_BODY} bytes, got {size} or more", 413)


async def _close(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.close", "code": 1008})


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


def accepted_hosts(host: str) -> frozenset[str] | None:
    """Return the names that a page served on `host` answers to; None, all, unless it is a loopback address."""
    try:
        loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        loopback = False
    own = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", own}) if loopback else None


def launch(
    model: str = embedded.DEFAULT,
    runs: str | os.PathLike[str] = "runs",
    host: str = "127.0.0.1",
    port: int | None = 7860,
    browser: bool = True,
    block: bool = True,
    load: LoadOptions | None = None,
) -> tuple[gr.Blocks, str]:
    """Load a model and serve the page until it is interrupted; without `block`, return at once.

    `runs` is the folder whose runs the Results tab reads, and no others. `port` None takes the first free one from 7860
    on. `load` says how the model is loaded. Returns the page, whose `close()` stops the server, and its address.
    """
    return serve(load_warm(model, load), runs, host, port, browser, block)


def serve(
    loaded: LoadedModel,
    runs: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = False,
    block: bool = False,
) -> tuple[gr.Blocks, str]:
    """Serve the page of a model that is loaded already; as `launch` otherwise."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it when it starts its server
    page = build_page(loaded, RunLibrary(Path(runs)))
    page.queue(max_size=LONGEST_QUEUE, default_concurrency_limit=4)
    _check_port(host, port)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        inbrowser=browser,
        share=False,
        prevent_thread_lock=not block,
        quiet=not block,
        show_error=False,
        allowed_paths=[],
        max_file_size=LARGEST_UPLOAD,
        ssr_mode=False,
        _frontend=False,  # no check that gives up after three seconds, which a busy machine needs, and advises to share
        mcp_server=False,
        enable_monitoring=False,
        footer_links=[],
        theme=theme(),
        css=STYLE.read_text(encoding="utf-8") + dark_css(".dark"),
        app_kwargs={
            "middleware": [Middleware(Guard, hosts=accepted_hosts(host))],
            "docs_url": None,
            "redoc_url": None,
        },
    )
    return page, address


def _check_port(host: str, port: int | None) -> None:
    """Say in one line that a port cannot be used: Gradio's own message names its environment variables."""
    if port is None:
        return
    if not 1 <= port <= 65535:
        raise ValueError(f"port={port}: give a number from 1 to 65535")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"host={host!r}, port={port}: {error.strerror}; give another port or host") from None
