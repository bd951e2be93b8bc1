"""The page, and its server: on this machine only, and closed to the pages of other sites."""

import logging
import os
import socket
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clustrs import __version__, embedded, validation
from clustrs.app import markup
from clustrs.app.results import RunLibrary
from clustrs.app.tabs import InspectTab, ResultsTab, TuneTab
from clustrs.app.trial import LoadedModel, load_warm
from clustrs.app.try_tab import Html, TryTab
from clustrs.corruptions.images import first_sentence
from clustrs.models.configuration import PruningConfig
from clustrs.palette import dark_css
from clustrs.validation import LoadOptions

logger = logging.getLogger(__name__)
STYLE = Path(__file__).with_name("style.css")
TEXT_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
CODE_FONTS = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
GRAYS = {  # Gradio's own are too faint to read
    **{"body_text_color_subdued": "#57606a", "body_text_color_subdued_dark": "#a9b4c2"},
    **{"block_label_text_color": "#3d444d", "block_label_text_color_dark": "#c9d1d9"},
    **{"block_title_text_color": "#3d444d", "block_title_text_color_dark": "#c9d1d9"},
}
CLEANING, UPLOADS_KEPT = 600, 3600  # seconds between deletions of uploads, and age of those that are deleted
LARGEST_UPLOAD, LARGEST_BODY = "20mb", 21_000_000  # a request has an upload and some text around it
LONGEST_QUEUE = 32
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-src 'none'; object-src 'none'"
)
"""Browsers load from this server alone, whatever Gradio's page or a stored answer asks for."""
PROXY = "/proxy="  # a route of Gradio that fetches from other servers


class Page(gr.Blocks):  # type: ignore[misc]
    """Blocks whose errors reach the visitor in one sentence, whatever data a request has, and fill no log."""

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return await super().process_api(*args, **kwargs)
        except Exception as error:
            logger.debug("an event handler failed", exc_info=True)
            shown = error.message if isinstance(error, gr.Error) else first_sentence(error)
            raise gr.Error(shown, print_exception=False) from None


class BodyTooLarge(Exception):
    """More bytes came than a request may have."""


class Guard:
    """ASGI middleware: refuse foreign hosts, foreign origins and large bodies; add the content security policy.

    A page of another site can make a browser send requests to this machine (DNS rebinding gives it even the answers),
    but the browser then names that site in `Host` or `Origin`. `hosts` are accepted in `Host`, None stands for all.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        status, reason = self._refusal(scope["path"], Headers(scope=scope))
        if status and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        started, received = False, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > LARGEST_BODY:
                raise BodyTooLarge
            return message

        async def with_policy(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        try:
            if not status:
                await self.app(scope, counted, with_policy)
        except BodyTooLarge:
            status, reason = _too_large(received)
        except (KeyError, IndexError, TypeError, ValueError) as error:  # Gradio's routes trust some fields
            status, reason = 400, f"bad request: {type(error).__name__}"
        if status and not started:
            await PlainTextResponse(reason, status)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str]:
        if PROXY in path:
            return 404, "not found"
        host, origin, length = headers.get("host", ""), headers.get("origin"), headers.get("content-length", "0")
        if self.hosts is not None:
            name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()
            if name not in self.hosts:
                return 403, f"Host must be one of {', '.join(sorted(self.hosts))}, got {host!r}"
            if origin is not None and origin.partition("://")[2] != host:
                return 403, f"Origin must be this page's, {host}, got {origin!r}"
        if length.isdecimal() and len(length) < 20 and int(length) > LARGEST_BODY:
            return _too_large(int(length))
        return 0, ""


def _too_large(size: int) -> tuple[int, str]:
    return 413, f"a request must have at most {LARGEST_BODY} bytes, got {size} or more"


def accepted_hosts(host: str) -> frozenset[str] | None:
    """Return the names that a page served on `host` answers to; None, all, unless it is a loopback address."""
    try:
        loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        loopback = False
    own = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", own}) if loopback else None


def launch(
    model: str | LoadedModel = embedded.DEFAULT,
    runs: str | os.PathLike[str] = "runs",
    host: str = "127.0.0.1",
    port: int | None = 7860,
    browser: bool = True,
    block: bool = True,
    load: LoadOptions | None = None,
    pruning: PruningConfig | None = None,
) -> tuple[gr.Blocks, str]:
    """Load a model and serve the page until it is interrupted.

    Gradio's telemetry is off, no fonts are loaded, and uploads are deleted after an hour.

    Args:
        model: an embedded model, a folder, an id of the Hugging Face hub, or a model that is loaded already.
        runs: the only folder whose runs the Results tab reads.
        host: address to listen on; a loopback address refuses foreign `Host` and `Origin` headers.
        port: port to listen on; None takes the first free one from 7860 on.
        browser: open a browser.
        block: wait until the server is interrupted; otherwise return at once.
        load: how the model is loaded.
        pruning: the method that is chosen at first, with its parameters, budget, positions and attention.

    Returns:
        The page, whose `close()` stops the server, and its address.

    Raises:
        ValueError: the model cannot be loaded, or the port cannot be used.
    """
    if port is not None:  # in one line: Gradio's own message names its environment variables
        validation.check(1 <= port <= 65535, "port", "a number from 1 to 65535", port)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                problem = f"cannot listen on host {host!r}, port {port} ({error.strerror})"
                raise ValueError(f"{problem}: try another port") from None
    loaded = load_warm(model, load) if isinstance(model, str) else model
    loaded = loaded if pruning is None else replace(loaded, pruning=pruning)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it when it starts its server
    with Page(title="ClustRS", analytics_enabled=False, delete_cache=(CLEANING, UPLOADS_KEPT)) as page:
        Html(markup.render("intro", model=loaded.name, embedded=loaded.embedded, version=__version__))
        with gr.Tab("Try", id="try"):
            inputs = TryTab(loaded).build()
        with gr.Tab("Inspect", id="inspect") as tab:
            InspectTab(loaded).build(tab, inputs)
        with gr.Tab("Tune", id="tune"):
            TuneTab(loaded).build()
        with gr.Tab("Results", id="results") as tab:
            ResultsTab(loaded, RunLibrary(Path(runs))).build(tab)
    page.queue(max_size=LONGEST_QUEUE, default_concurrency_limit=4)
    guards = [Middleware(Guard, hosts=accepted_hosts(host))]
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        inbrowser=browser,
        share=False,
        prevent_thread_lock=True,
        quiet=True,
        show_error=False,
        allowed_paths=[],
        max_file_size=LARGEST_UPLOAD,
        ssr_mode=False,
        _frontend=False,  # no check that gives up after three seconds, which a busy machine needs, and advises to share
        mcp_server=False,
        enable_monitoring=False,
        footer_links=[],
        theme=gr.themes.Default(primary_hue="blue", font=TEXT_FONTS, font_mono=CODE_FONTS).set(**GRAYS),
        css=STYLE.read_text(encoding="utf-8") + dark_css(".dark"),
        app_kwargs={"middleware": guards, "docs_url": None, "redoc_url": None},
    )
    if block:
        print(f"{loaded.name} is served at {address} (Ctrl+C stops it)", flush=True)
        page.block_thread()
    return page, address
