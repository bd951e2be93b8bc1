"""The three tabs: Try (several methods side by side), Inspect (what a method kept, and why), Results (runs)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from clustrs.app import markup
from clustrs.app.inspection import inspect
from clustrs.app.results import Disagreement, OpenRun, RunLibrary, disagreements, kept_images, rival
from clustrs.app.trial import (
    NO_PRUNING,
    LoadedModel,
    Source,
    Trial,
    TrialAnswer,
    corrupted,
    level_range,
    nearest_level,
    run_trial,
    sample_sources,
    uploaded,
)
from clustrs.corruptions import Corruption, list_corruptions
from clustrs.corruptions.images import first_sentence
from clustrs.evaluation.config import CLEAN
from clustrs.models.ask import as_seen, name_unknown_words
from clustrs.pruners import get_method, list_methods

INSPECT_SCRIPT, BUTTONS_SCRIPT = (Path(__file__).with_name(name) for name in ("inspect.js", "buttons.js"))
MODEL_QUEUE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
"""Settings of events that use the model, one at a time."""
SHOWN_AT_FIRST = ("clustrs", "fastervlm", "divprune")
KEEP = 16
LONGEST_ANSWER = 512
LONGEST_QUESTION = 2000
"""Characters."""
OWN_QUESTION = "What is in the image?"


@dataclass(frozen=True)
class ImageInputs:
    """Components that describe the image; the Inspect tab reads them, too."""

    source: gr.State
    corruption: gr.Dropdown
    level: gr.Slider
    seed: gr.Number

    def listed(self) -> list[Any]:
        return [self.source, self.corruption, self.level, self.seed]


class TryTab:
    """The first tab: what the unpruned model and each method answer, side by side."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.samples = sample_sources(loaded.embedded.task if loaded.embedded else None)
        self.own_question = loaded.embedded.question if loaded.embedded else OWN_QUESTION
        self.pruning = [name for name in list_methods() if name != NO_PRUNING]

    def build(self) -> ImageInputs:
        """Lay the tab out, inside a `gr.Tab`."""
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=300):
                inputs, gallery, upload, notice = self._image_column()
            with gr.Column(scale=4, min_width=300):
                preview = gr.HTML(
                    self.preview(self.samples[0], CLEAN, 0, 0), elem_id="preview", apply_default_css=False
                )
        question, known = self._question_row()
        methods, keep, longest, ask = self._method_row()
        status = gr.HTML(_status("press Ask to compare them"), elem_id="status", min_height=40, apply_default_css=False)
        with gr.Row(elem_classes="cl-cards", elem_id="answers"):
            cards = [gr.HTML(visible=False, apply_default_css=False) for _ in list_methods()]
        chosen: list[Any] = [inputs.source, known, question, notice]
        gallery.select(self.choose_sample, None, [*chosen, upload], show_progress="hidden")
        upload.upload(self.take_upload, [upload, inputs.source], [*chosen, gallery])
        known.input(lambda text: text, known, question, show_progress="hidden")
        inputs.corruption.change(self.change_corruption, inputs.corruption, inputs.level, show_progress="hidden")
        shown: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
        for event in (inputs.source.change, inputs.corruption.change, inputs.level.change, inputs.seed.change):
            event(self.preview, inputs.listed(), preview, **shown)
        gr.on(
            [ask.click, question.submit],
            self.answer,
            [*inputs.listed(), question, methods, keep, longest],
            [status, *cards],
            **MODEL_QUEUE,
            trigger_mode="once",
            show_progress="full",
            show_progress_on=[status],
        )
        return inputs

    def _image_column(self) -> tuple[ImageInputs, gr.Gallery, gr.File, gr.HTML]:
        source = gr.State(self.samples[0])
        gallery = gr.Gallery(
            [(str(sample.path), sample.path.stem) for sample in self.samples],
            label="Sample images",
            columns=5,
            allow_preview=False,
            selected_index=0,
            object_fit="cover",
            interactive=False,
            buttons=[],
            elem_id="samples",
        )
        upload = gr.File(label="Or your own image", height=130, file_count="single", type="filepath", elem_id="upload")
        notice = gr.HTML(visible=False, elem_id="notice", apply_default_css=False)
        with gr.Row():
            corruption = gr.Dropdown(
                [CLEAN, *list_corruptions()], value=CLEAN, label="Corruption", elem_id="corruption"
            )
            level = gr.Slider(**asdict(level_range("gaussian")), label="Level", interactive=False, elem_id="level")
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=80, elem_id="seed")
        return ImageInputs(source, corruption, level, seed), gallery, upload, notice

    def _question_row(self) -> tuple[gr.Textbox, gr.Dropdown]:
        questions = [question for question, _ in self.samples[0].questions]
        with gr.Row():
            question = gr.Textbox(questions[0], label="Question", lines=1, max_lines=3, scale=3, elem_id="question")
            known = gr.Dropdown(
                questions,
                value=questions[0],
                label="Questions with a known answer",
                scale=2,
                elem_id="known",
            )
        return question, known

    def _method_row(self) -> tuple[gr.CheckboxGroup, gr.Slider, gr.Number, gr.Button]:
        most = self.loaded.visual_tokens
        methods = gr.CheckboxGroup(
            [(markup.label(name), name) for name in self.pruning],
            value=[name for name in SHOWN_AT_FIRST if name in self.pruning],
            label="Methods, beside the unpruned model",
            elem_id="methods",
        )
        with gr.Row(equal_height=True):
            keep = gr.Slider(
                1, most, min(KEEP, most), step=1, label="Visual tokens to keep (k)", scale=4, elem_id="keep"
            )
            longest = gr.Number(
                32, label="Longest answer (tokens)", precision=0, minimum=1, maximum=LONGEST_ANSWER, min_width=120
            )
            ask = gr.Button("Ask", variant="primary", scale=1, min_width=140, elem_id="ask")
        return methods, keep, longest, ask

    def choose_sample(self, event: gr.SelectData) -> tuple[Any, ...]:
        """Return the sample that was clicked, its questions, its first question, no notice, no upload."""
        source = self.samples[int(event.index)]
        return source, *self._questions(source), gr.HTML(visible=False), None

    def take_upload(self, path: str, before: Source) -> tuple[Any, ...]:
        """Return the uploaded image in place of the sample; a file that is refused leaves the image as it was."""
        try:
            source = uploaded(Path(path))
        except ValueError as error:
            note = markup.render("notice", text=f"This file was refused. {str(error)[:1].upper()}{str(error)[1:]}.")
            return before, gr.skip(), gr.skip(), gr.HTML(note, visible=True), gr.skip()
        return source, *self._questions(source), gr.HTML(visible=False), gr.Gallery(selected_index=None)

    def _questions(self, source: Source) -> tuple[Any, Any]:
        listed = [question for question, _ in source.questions]
        first = listed[0] if listed else None
        return gr.Dropdown(listed, value=first, interactive=bool(listed)), first or self.own_question

    def change_corruption(self, name: str) -> Any:
        """Return the slider for a corruption's levels."""
        if name == CLEAN:
            return gr.Slider(interactive=False)
        return gr.Slider(**asdict(level_range(name)), interactive=True)

    def preview(self, source: Source, corruption: str, level: float, seed: float) -> str:
        """Show the image as the model gets it."""
        caption = source.name
        if corruption != CLEAN:
            caption += f", {Corruption(corruption, nearest_level(corruption, level))}, seed {int(seed or 0)}"
        return markup.preview(corrupted(source, corruption, level, int(seed or 0)), caption)

    def answer(
        self,
        source: Source,
        corruption: str,
        level: float,
        seed: float,
        question: str,
        methods: list[str],
        keep: float,
        longest: float,
    ) -> Iterator[list[Any]]:
        """Yield updates of the status line and of one card per method, as the answers grow.

        Words that are not in the model's vocabulary are named above the status.
        """
        if not isinstance(question, str) or len(question) > LONGEST_QUESTION:
            raise ValueError(f"question must be a text of at most {LONGEST_QUESTION} characters")
        unknown = name_unknown_words(self.loaded.processor, question)
        image = corrupted(source, corruption, level, int(seed or 0))
        most = min(LONGEST_ANSWER, max(1, int(longest or 1)))
        trial = Trial(image, question, tuple(methods), int(keep), most)
        names = [pruner.name for pruner in trial.pruners()]
        yield [_status("encoding the image", unknown), *self._fresh_cards(names)]
        shown, expected = as_seen(self.loaded.processor, image), source.expected(question)
        latest: dict[str, TrialAnswer] = {}
        pictures: dict[str, str] = {}  # drawn once for all pieces of an answer
        rest: list[Any] = [gr.skip()] * (len(list_methods()) - len(names))
        for answer in run_trial(self.loaded, trial):
            latest[answer.method] = answer
            picture = pictures.get(answer.method) or markup.kept_picture(shown, answer)
            pictures[answer.method] = picture
            card = markup.answer_card(answer, picture, expected, list(latest.values()))
            updates = [gr.HTML(card) if name == answer.method else gr.skip() for name in names]
            yield [_status(f"{markup.label(answer.method)} is answering", unknown), *updates, *rest]
        done = "no answer is known for this question" if expected is None else f"expected answer: {expected}"
        yield [_status(done, unknown), *[gr.skip()] * len(list_methods())]

    def _fresh_cards(self, names: list[str]) -> list[Any]:
        hidden = [gr.HTML("", visible=False)] * (len(list_methods()) - len(names))
        return [*(gr.HTML(markup.waiting_card(name), visible=True) for name in names), *hidden]


def _status(text: str, unknown: str = "") -> str:
    status = markup.render("status", text=text)
    warning = f"{unknown}: read as unknown, so the answers may mean nothing."
    return markup.render("notice", text=warning) + status if unknown else status


class InspectTab:
    """The second tab: what a method kept of the image, and why."""

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
            js_on_load=INSPECT_SCRIPT.read_text(encoding="utf-8"),
            min_height=80,
            elem_id="inspection",
            apply_default_css=False,
        )
        gr.on(
            [tab.select, method.change, keep.release],
            self.show,
            [*inputs.listed(), method, keep],
            view,
            **MODEL_QUEUE,
            trigger_mode="always_last",
        )

    def show(self, source: Source, corruption: str, level: float, seed: float, method: str, keep: float) -> str:
        """Show the clean image, and the corrupted one if the Try tab corrupts it."""
        images = [(f"{source.name}, clean", source.open())]
        if corruption != CLEAN:
            title = f"{source.name}, {Corruption(corruption, nearest_level(corruption, level))}"
            images.append((title, corrupted(source, corruption, level, int(seed or 0))))
        return markup.inspection(inspect(self.loaded, get_method(method, keep=int(keep)), images))


class ResultsTab:
    """The third tab: a run's curves and tables, and the questions on which two methods disagree."""

    def __init__(self, loaded: LoadedModel, library: RunLibrary) -> None:
        self.loaded = loaded
        self.library = library

    def build(self, tab: gr.Tab) -> None:
        """Lay the tab out, inside `tab`."""
        script = BUTTONS_SCRIPT.read_text(encoding="utf-8")
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
        listed.select(self.question, [*filters, *pair], one, **MODEL_QUEUE)

    def refresh(self, name: str | None) -> tuple[Any, Any]:
        """List the runs; the one that was open stays open."""
        names = self.library.names()
        value = name if name in names else next(iter(names), None)
        folder = self.library.folder
        note = "" if names else f"There is no run under {folder} yet: clustrs eval --output {folder}/NAME writes one."
        return gr.Dropdown(names, value=value), _notice(note)

    def open(self, name: str | None) -> tuple[Any, Any, Any]:
        """Return the filters of a run."""
        if not name:
            return gr.Dropdown([], value=None), gr.Dropdown([], value=None), gr.skip()
        try:
            opened = self.library.open(name)
        except ValueError as error:
            return gr.Dropdown([], value=None), gr.Dropdown([], value=None), _notice(str(error))
        corruptions, budgets = opened.corruptions(), list(opened.run.budgets)
        return gr.Dropdown(corruptions, value=corruptions[0]), gr.Dropdown(budgets, value=budgets[0]), _notice("")

    def show(self, name: str | None, corruption: str | None, budget: str | None) -> tuple[Any, ...]:
        """Show curves, table, and the first pair of methods to compare, under the most severe level."""
        if not name or not corruption or not budget:
            empty = gr.Dropdown([], value=None)
            return "", "", empty, empty, empty, ""
        opened = self.library.open(name)
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
        """Go from a number in the table to the questions behind it."""
        opened = self.library.open(name)
        chosen = int(event._data["method"]), int(event._data["condition"])
        if chosen[0] not in opened.methods(budget) or chosen[1] not in opened.conditions(corruption):
            raise ValueError("this number is not in the table any more: choose another")
        return (
            markup.cells(opened, corruption, budget, chosen),
            *self._pair(opened, corruption, budget, *chosen),
            "",
        )

    def compare(
        self, name: str, corruption: str, budget: str, first: Any, second: Any, condition: Any
    ) -> tuple[str, str]:
        """List the questions on which two methods disagree."""
        if None in (name, first, second, condition):
            return "", ""
        opened = self.library.open(name)
        found = disagreements(opened, first, second, condition)
        under = str(opened.run.conditions[condition])
        return markup.disagreement_list(found, opened.label(first), opened.label(second), under), ""

    def question(
        self, event: gr.EventData, name: str, corruption: str, budget: str, first: int, second: int, condition: int
    ) -> str:
        """Show one of those questions, with its image and what each method kept of it."""
        opened = self.library.open(name)
        found = disagreements(opened, first, second, condition)
        index = int(event._data["index"])
        if not 0 <= index < len(found):
            raise ValueError("this question is not in the list any more: choose another")
        pictures, note = self._pictures(opened, found[index])
        return markup.disagreement(found[index], pictures, note)

    def _pictures(self, opened: OpenRun, one: Disagreement) -> tuple[list[Image.Image | None], str]:
        try:
            return kept_images(self.loaded, opened, one)
        except Exception as error:  # a task may be somebody else's, and its images may be gone
            return [None, None], f"The image cannot be shown: {first_sentence(error)}"

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
