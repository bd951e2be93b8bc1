"""`clustrs app`: the local web page."""

from dataclasses import dataclass
from pathlib import Path

from clustrs.cli.arguments import option
from clustrs.cli.commands import command
from clustrs.cli.options import ModelOptions
from clustrs.embedded import folder_of


@dataclass(frozen=True, kw_only=True)
class AppOptions(ModelOptions):
    """The options of `clustrs app`."""

    runs: Path = option(Path("runs"), "the folder whose runs the page shows", metavar="FOLDER")
    host: str = option("127.0.0.1", "the address to listen on; by default, only this machine reaches it")
    port: int = option(7860, "the port to listen on", high=65535)
    no_browser: bool = option(False, "do not open a browser")


@command("app", panel="Try")
def run_app(options: AppOptions) -> None:
    """Open a local web page: try methods on an image, look into their clusters, read runs."""
    folder_of(options.model)  # a mistyped name is told at once

    from clustrs.app import launch

    launch(
        options.model,
        options.runs,
        options.host,
        options.port,
        browser=not options.no_browser,
        load=options.load_options(),
    )
