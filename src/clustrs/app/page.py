"""The page: three tabs over one model and one folder of runs."""

import logging
from pathlib import Path
from typing import Any

import gradio as gr

from clustrs import __version__, embedded
from clustrs.app import markup
from clustrs.app.inspect_tab import InspectTab
from clustrs.app.loaded_model import LoadedModel
from clustrs.app.results import RunLibrary
from clustrs.app.results_tab import ResultsTab
from clustrs.app.try_tab import TryTab
from clustrs.corruptions.images import first_sentence

logger = logging.getLogger(__name__)
STYLE = Path(__file__).with_name("style.css")
TEXT_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
CLEANING, UPLOADS_KEPT = 600, 3600
"""Every so many seconds, uploads of so many seconds ago are deleted."""
CODE_FONTS = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


class Page(gr.Blocks):  # type: ignore[misc]
    """Blocks whose errors reach the visitor in one sentence, whatever data a request has, and fill no log."""

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run an event handler; any error becomes a `gr.Error` without a traceback."""
        try:
            return await super().process_api(*args, **kwargs)
        except Exception as error:
            logger.debug("an event handler failed", exc_info=True)
            shown = error.message if isinstance(error, gr.Error) else first_sentence(error)
            raise gr.Error(shown, print_exception=False) from None


def build_page(loaded: LoadedModel, library: RunLibrary) -> gr.Blocks:
    """Lay out the page. Gradio's telemetry is off, and uploads are deleted after an hour."""
    gr.set_static_paths(embedded.sample_folders())  # served where they lie; only uploads go to the cache
    with Page(title="ClustRS", analytics_enabled=False, delete_cache=(CLEANING, UPLOADS_KEPT)) as page:
        gr.HTML(
            markup.render("intro", model=loaded.name, embedded=loaded.embedded, version=__version__),
            apply_default_css=False,
        )
        with gr.Tab("Try", id="try"):
            inputs = TryTab(loaded).build()
        with gr.Tab("Inspect", id="inspect") as tab:
            InspectTab(loaded).build(tab, inputs)
        with gr.Tab("Results", id="results") as tab:
            ResultsTab(loaded, library).build(tab)
    return page


def theme() -> gr.themes.Base:
    """A theme that loads no fonts: those of the visitor's system are used."""
    plain = gr.themes.Default(primary_hue="blue", font=list(TEXT_FONTS), font_mono=list(CODE_FONTS))
    return plain.set(  # Gradio's own greys are too faint to read
        body_text_color_subdued="#57606a",
        body_text_color_subdued_dark="#a9b4c2",
        block_label_text_color="#3d444d",
        block_label_text_color_dark="#c9d1d9",
        block_title_text_color="#3d444d",
        block_title_text_color_dark="#c9d1d9",
    )
