"""Serves the page on this machine, and keeps it from reaching any other."""

import os
import socket
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clustrs import embedded
from clustrs.app.loaded_model import LoadedModel, load_warm
from clustrs.app.page import STYLE, build_page, theme
from clustrs.app.results import RunLibrary
from clustrs.models.load import LoadOptions
from clustrs.palette import dark_css

LARGEST_UPLOAD = "20mb"
LONGEST_QUEUE = 32
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-src 'none'; object-src 'none'"
)
"""Lets a browser load from this server alone, whatever Gradio's page or a stored answer would ask it to load."""


class ContentSecurityPolicy:
    """ASGI middleware that adds the policy to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, send_with_policy if scope["type"] == "http" else send)


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
        footer_links=[],
        theme=theme(),
        css=STYLE.read_text(encoding="utf-8") + dark_css(".dark"),
        app_kwargs={"middleware": [Middleware(ContentSecurityPolicy)], "docs_url": None, "redoc_url": None},
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
