"""The page: three tabs over one model and one folder of runs."""

from pathlib import Path

import gradio as gr

from clustrs import __version__
from clustrs.app import markup
from clustrs.app.engine import Engine
from clustrs.app.inspect_tab import InspectTab
from clustrs.app.results import RunLibrary
from clustrs.app.results_tab import ResultsTab
from clustrs.app.try_tab import TryTab

STYLE = Path(__file__).with_name("style.css")
TEXT_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
CODE_FONTS = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def build_page(engine: Engine, library: RunLibrary) -> gr.Blocks:
    """Lay out the page. Gradio's telemetry is off."""
    with gr.Blocks(title="ClustRS", analytics_enabled=False) as page:
        gr.HTML(markup.render("intro", model=engine.name, embedded=engine.embedded, version=__version__))
        with gr.Tab("Try", id="try"):
            inputs = TryTab(engine).build()
        with gr.Tab("Inspect", id="inspect") as tab:
            InspectTab(engine).build(tab, inputs)
        with gr.Tab("Results", id="results") as tab:
            ResultsTab(engine, library).build(tab)
    return page


def theme() -> gr.themes.Base:
    """A theme that loads no fonts: those of the visitor's system are used."""
    return gr.themes.Default(primary_hue="blue", font=list(TEXT_FONTS), font_mono=list(CODE_FONTS))
