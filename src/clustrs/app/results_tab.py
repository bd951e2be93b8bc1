"""The third tab: a run of `clustrs eval`, its curves and tables, and the questions on which two methods disagree."""

from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from clustrs.app import markup
from clustrs.app.kept import kept_images
from clustrs.app.loaded_model import LoadedModel
from clustrs.app.results import Disagreement, OpenRun, RunLibrary, disagreements, rival
from clustrs.app.try_tab import MODEL_QUEUE
from clustrs.corruptions.images import first_sentence

SCRIPT = Path(__file__).with_name("buttons.js")


class ResultsTab:
    """Lays the tab out and answers its events."""

    def __init__(self, loaded: LoadedModel, library: RunLibrary) -> None:
        self.loaded = loaded
        self.library = library

    def build(self, tab: gr.Tab) -> None:
        """Lay the tab out, inside `tab`."""
        script = SCRIPT.read_text(encoding="utf-8")
        with gr.Row():
            name = gr.Dropdown([], label=f"Run under {self.library.folder}", scale=3, elem_id="run")
            corruption = gr.Dropdown([], label="Corruption", elem_id="run-corruption")
            budget = gr.Dropdown([], label="Kept tokens (k)", elem_id="run-keep")
        notice = gr.HTML(visible=False, elem_id="run-notice", apply_default_css=False)
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300):
                curves = gr.HTML(elem_id="curves", apply_default_css=False)
            with gr.Column(scale=3, min_width=300):
                cells = gr.HTML(js_on_load=script, elem_id="cells", apply_default_css=False)
        with gr.Row():
            first = gr.Dropdown([], label="Method", elem_id="first")
            second = gr.Dropdown([], label="Compared with", elem_id="second")
            condition = gr.Dropdown([], label="Under", elem_id="condition")
        listed = gr.HTML(js_on_load=script, elem_id="disagreements", apply_default_css=False)
        one = gr.HTML(elem_id="disagreement", apply_default_css=False)
        pair: list[Any] = [first, second, condition]
        filters: list[Any] = [name, corruption, budget]
        tab.select(self.refresh, name, [name, notice]).then(
            self.open, name, [corruption, budget, notice], show_progress="hidden"
        ).then(self.show, filters, [curves, cells, *pair, one])
        name.input(self.open, name, [corruption, budget, notice]).then(self.show, filters, [curves, cells, *pair, one])
        for choice in (corruption, budget):
            choice.input(self.show, filters, [curves, cells, *pair, one])
        cells.select(self.jump, filters, [cells, *pair, one], show_progress="hidden")
        for choice in pair:
            choice.change(self.compare, [*filters, *pair], [listed, one], show_progress="hidden")
        listed.select(
            self.question,
            [*filters, *pair],
            one,
            concurrency_id=MODEL_QUEUE,
            concurrency_limit=1,
        )

    def refresh(self, name: str | None) -> tuple[Any, Any]:
        """The runs that there are now; the one that was open stays open."""
        names = self.library.names()
        value = name if name in names else next(iter(names), None)
        folder = self.library.folder
        note = "" if names else f"There is no run under {folder} yet: clustrs eval --output {folder}/NAME writes one."
        return gr.Dropdown(names, value=value), _notice(note)

    def open(self, name: str | None) -> tuple[Any, Any, Any]:
        """The filters of a run."""
        if not name:
            return gr.Dropdown([], value=None), gr.Dropdown([], value=None), gr.skip()
        try:
            opened = self.library.open(name)
        except ValueError as error:
            return gr.Dropdown([], value=None), gr.Dropdown([], value=None), _notice(str(error))
        corruptions, budgets = opened.corruptions(), list(opened.run.budgets)
        return gr.Dropdown(corruptions, value=corruptions[0]), gr.Dropdown(budgets, value=budgets[0]), _notice("")

    def show(self, name: str | None, corruption: str | None, budget: str | None) -> tuple[Any, ...]:
        """Curves, table, and the first pair of methods to compare, under the most severe level."""
        if not name or not corruption or not budget:
            empty = gr.Dropdown([], value=None)
            return "", "", empty, empty, empty, ""
        opened = self._opened(name)
        methods = opened.methods(budget)
        ours = [m for m in methods if opened.run.methods[m].name == "clustrs"]
        first = (ours or methods)[0]
        return (
            markup.curves(opened, corruption, budget),
            markup.cells(opened, corruption, budget),
            *self._pair(opened, corruption, budget, first, opened.conditions(corruption)[-1]),
            "",
        )

    def jump(self, event: gr.EventData, name: str, corruption: str, budget: str) -> tuple[Any, ...]:
        """From a number in the table to the questions behind it."""
        opened = self._opened(name)
        chosen = int(event._data["method"]), int(event._data["condition"])
        if chosen[0] not in opened.methods(budget) or chosen[1] not in opened.conditions(corruption):
            raise gr.Error("this number is not in the table any more: choose another", print_exception=False)
        return (
            markup.cells(opened, corruption, budget, chosen),
            *self._pair(opened, corruption, budget, *chosen),
            "",
        )

    def compare(
        self, name: str, corruption: str, budget: str, first: Any, second: Any, condition: Any
    ) -> tuple[str, str]:
        """The questions on which two methods disagree."""
        if None in (name, first, second, condition):
            return "", ""
        opened = self._opened(name)
        found = disagreements(opened, first, second, condition)
        under = str(opened.run.conditions[condition])
        return markup.disagreement_list(found, opened.label(first), opened.label(second), under), ""

    def question(
        self, event: gr.EventData, name: str, corruption: str, budget: str, first: int, second: int, condition: int
    ) -> str:
        """One of those questions, with its image and what each method kept of it."""
        opened = self._opened(name)
        found = disagreements(opened, first, second, condition)
        index = int(event._data["index"])
        if not 0 <= index < len(found):
            raise gr.Error("this question is not in the list any more: choose another", print_exception=False)
        pictures, note = self._pictures(opened, found[index])
        return markup.disagreement(found[index], pictures, note)

    def _pictures(self, opened: OpenRun, one: Disagreement) -> tuple[list[Image.Image | None], str]:
        try:
            return kept_images(self.loaded, opened, one)
        except Exception as error:  # a task may be somebody else's, and its images may be gone
            return [None, None], f"The image cannot be shown: {first_sentence(error)}"

    def _opened(self, name: str) -> OpenRun:
        try:
            return self.library.open(name)
        except ValueError as error:
            raise gr.Error(first_sentence(error), print_exception=False) from None

    def _pair(self, opened: OpenRun, corruption: str, budget: str, first: int, condition: int) -> list[Any]:
        methods = [(opened.label(m), m) for m in opened.methods(budget)]
        conditions = [(str(opened.run.conditions[c]), c) for c in opened.conditions(corruption)]
        second = rival(opened, budget, first)
        return [
            gr.Dropdown(methods, value=first),
            gr.Dropdown(methods, value=second),
            gr.Dropdown(conditions, value=condition),
        ]


def _notice(text: str) -> Any:
    """A line that stands out; nothing at all where there is nothing to say."""
    return gr.HTML(markup.render("notice", text=text), visible=bool(text))
