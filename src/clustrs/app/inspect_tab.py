"""The second tab: what a method kept of the image, and why."""

from pathlib import Path

import gradio as gr

from clustrs.app import markup
from clustrs.app.inspection import inspect
from clustrs.app.loaded_model import LoadedModel
from clustrs.app.source import Source, corrupted, nearest_level
from clustrs.app.trial import NO_PRUNING
from clustrs.app.try_tab import KEEP, MODEL_QUEUE, ImageInputs
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import first_sentence
from clustrs.evaluation.config import CLEAN
from clustrs.pruners import get_method, list_methods

SCRIPT = Path(__file__).with_name("inspect.js")


class InspectTab:
    """Lays the tab out and answers its events."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def build(self, tab: gr.Tab, inputs: ImageInputs) -> None:
        """Lay the tab out, inside `tab`; it shows the image that `inputs` of the Try tab describe."""
        names = [name for name in list_methods() if name != NO_PRUNING]
        most = self.loaded.visual_tokens
        with gr.Row(equal_height=True):
            method = gr.Dropdown(
                [(markup.label(name), name) for name in names],
                value="clustrs",
                label="Method",
                elem_id="inspect-method",
            )
            keep = gr.Slider(
                1, most, min(KEEP, most), step=1, label="Visual tokens to keep (k)", scale=3, elem_id="inspect-keep"
            )
        view = gr.HTML(
            js_on_load=SCRIPT.read_text(encoding="utf-8"), min_height=80, elem_id="inspection", apply_default_css=False
        )
        gr.on(
            [tab.select, method.change, keep.release],
            self.show,
            [*inputs.listed(), method, keep],
            view,
            concurrency_id=MODEL_QUEUE,
            concurrency_limit=1,
            trigger_mode="always_last",
        )

    def show(self, source: Source, corruption: str, level: float, seed: float, method: str, keep: float) -> str:
        """The clean image, and the corrupted one if the Try tab corrupts it."""
        try:
            images = [(f"{source.name}, clean", source.open())]
            if corruption != CLEAN:
                title = f"{source.name}, {Corruption(corruption, nearest_level(corruption, level))}"
                images.append((title, corrupted(source, corruption, level, int(seed or 0))))
            return markup.inspection(inspect(self.loaded, get_method(method, keep=int(keep)), images))
        except ValueError as error:
            raise gr.Error(first_sentence(error), print_exception=False) from None
