"""The tabs beside Try: Inspect (what a method kept, and why), Tune (which method and budget to take), Results."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from clustrs.app import markup
from clustrs.app.inspection import inspect
from clustrs.app.results import OpenRun, RunLibrary, disagreements, kept_images, spelled, stored_entries
from clustrs.app.trial import LoadedModel, Source, corrupted, sample_sources
from clustrs.app.try_tab import (
    BUTTONS_SCRIPT,
    HIDDEN,
    MODEL_QUEUE,
    PRUNING,
    SHOWN_AT_FIRST,
    Html,
    caption,
    check_question,
    error_line,
    keep_slider,
    notice,
)
from clustrs.corruptions.images import first_sentence
from clustrs.evaluation.config import CLEAN
from clustrs.evaluation.report.leaderboard import Entry, read_entries
from clustrs.evaluation.report.scores import OURS
from clustrs.evaluation.tuning import tune
from clustrs.models.configuration import FILE
from clustrs.pruners import list_methods

STORED, EVERY = "the embedded models, as stored", "all"
TUNED = ("clustermeans", "clustrs", "divprune")  # methods that are ticked at first
MOST_IMAGES, MOST_QUESTIONS = 200, 20
INSPECT_SCRIPT = Path(__file__).with_name("inspect.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class InspectTab:
    """The second tab: what a method kept of the image, and why."""

    loaded: LoadedModel

    def build(self, tab: gr.Tab, inputs: list[Any]) -> None:
        """Lay the tab out, inside `tab`; it shows the image that `inputs` of the Try tab describe."""
        with gr.Row(equal_height=True):
            before = [one for one in PRUNING if one[1] in list_methods("encoder")]  # others have no clusters to show
            method = gr.Dropdown(before, value=SHOWN_AT_FIRST[0], label="Method", elem_id="inspect-method")
            keep = keep_slider(self.loaded, "inspect-keep", 3)
            label = "Question, for methods that read it"
            question = gr.Textbox(self.loaded.question, label=label, scale=2, elem_id="inspect-question")
        view = Html(js_on_load=INSPECT_SCRIPT, min_height=80, elem_id="inspection")
        events = [tab.select, method.change, keep.release, question.submit]
        gr.on(events, self.show, [*inputs, method, keep, question], view, **MODEL_QUEUE, trigger_mode="always_last")

    def show(
        self, source: Source, corruption: str, level: float, seed: float, method: str, keep: float, question: str
    ) -> str:
        """Show the clean image, and the corrupted one if the Try tab corrupts it."""
        check_question(question)
        first = ", first frame alone" if source.clip else ""
        images = [(f"{source.name}{first}, clean", source.frames()[0])]
        if corruption != CLEAN:
            image = corrupted(source, corruption, level, int(seed or 0))[0]
            images.append((caption(source, corruption, level), image))
        return markup.inspection(inspect(self.loaded, self.loaded.method(method, int(keep)), images, question))


@dataclass(frozen=True)
class TuneTab:
    """The third tab: find a method and a budget on a visitor's images, and download the configuration."""

    loaded: LoadedModel
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory("-clustrs"))

    def build(self) -> None:
        """Lay the tab out, inside a `gr.Tab`."""
        Html(
            '<p class="cl-about">Finds the method and the smallest budget with which the model answers your questions '
            "as it does unpruned. No labels are needed.</p>"
        )
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=300):
                label = "Your images (without any: the samples)"
                kind: dict[str, Any] = {"file_count": "multiple", "file_types": ["image"], "height": 150}
                images = gr.File(label=label, elem_id="tune-images", **kind)
                hint = f"Empty: those of the samples, or {self.loaded.question!r} about your images"
                label = "Questions, one per line"
                questions = gr.Textbox(label=label, lines=3, placeholder=hint, elem_id="tune-questions")
                text = "Share of the answers that must stay the same"
                target = gr.Slider(0.5, 1, 0.97, step=0.01, label=text, elem_id="tune-target")
                with gr.Accordion("Methods and time", open=False, elem_id="tune-options"):
                    before = [one for one in PRUNING if one[1] in list_methods("encoder")]
                    methods = gr.CheckboxGroup(before, value=list(TUNED), label="Methods", elem_id="tune-methods")
                    minutes = gr.Number(2, label="Minutes after which it stops", minimum=0.1, maximum=60)
                run = gr.Button("Tune", variant="primary", elem_id="tune")
            with gr.Column(scale=2, min_width=300):
                with gr.Row():
                    file = gr.DownloadButton(f"Download {FILE}", variant="primary", visible=False, elem_id="tuned-file")
                    report = gr.DownloadButton("Download the report", visible=False, elem_id="tuned-report")
                result = Html('<p class="cl-sub">The Pareto front will be here.</p>', min_height=80, elem_id="tuned")
        given = [images, questions, target, minutes, methods]
        run.click(
            self.run, given, [result, file, report], **MODEL_QUEUE, trigger_mode="once", show_progress_on=[result]
        )

    def run(
        self, files: list[str] | None, questions: str, target: float, minutes: float, methods: list[str]
    ) -> tuple[Any, ...]:
        """Tune on the images, and show the Pareto front with the recommendation."""
        hidden = gr.DownloadButton(visible=False)
        try:
            check_question(questions)
            asked: Sequence[Any] = [line.strip() for line in questions.splitlines() if line.strip()][:MOST_QUESTIONS]
            if files:
                images, asked = [Path(file) for file in files][:MOST_IMAGES], asked or [self.loaded.question]
            else:
                samples = sample_sources(self.loaded)
                if samples[0].clip:
                    raise ValueError("upload images: the samples of this model are clips, and tuning is for images")
                images = [sample.path for sample in samples]
                asked = asked or [[question for question, _ in sample.questions] for sample in samples]
            if not methods:
                raise ValueError("tick at least one method")
            folder = Path(tempfile.mkdtemp(dir=self.folder.name))
            limits: dict[str, Any] = {"target": float(target), "minutes": float(minutes)}
            with self.loaded.lock:
                model, processor = self.loaded.model, self.loaded.processor
                result = tune(model, processor, images, asked, methods=methods, output=folder, **limits)
        except Exception as error:  # whatever it is, one line says so
            return error_line(error), hidden, hidden
        file = gr.DownloadButton(value=str(folder / FILE), visible=True) if result.recommended else hidden
        return markup.tuned(result), file, gr.DownloadButton(value=str(folder / "tune.html"), visible=True)


@dataclass(frozen=True)
class ResultsTab:
    """The last tab: a leaderboard, a run's curves, and the questions on which two methods disagree."""

    loaded: LoadedModel
    library: RunLibrary

    def build(self, tab: gr.Tab) -> None:
        """Lay the tab out, inside `tab`."""
        with gr.Row():
            board = gr.Dropdown([STORED], value=STORED, label="Leaderboard of", scale=2, elem_id="board")
            model = gr.Dropdown([EVERY], value=EVERY, label="Model", elem_id="board-model")
            keep = gr.Dropdown([EVERY], value=EVERY, label="Kept tokens (k)", elem_id="board-keep")
            setting = gr.Dropdown([EVERY], value=EVERY, label="Setting", elem_id="board-setting")
        ranked = Html(min_height=60, elem_id="leaderboard")
        with gr.Row():
            name = gr.Dropdown([], label=f"Run under {self.library.folder}", scale=3, elem_id="run")
            corruption = gr.Dropdown([], label="Corruption", elem_id="run-corruption")
            budget = gr.Dropdown([], label="Kept tokens (k)", elem_id="run-keep")
        notes = Html(visible=False, elem_id="run-notice")
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=300):
                curves = Html(elem_id="curves")
            with gr.Column(scale=2, min_width=300):
                cells = Html(js_on_load=BUTTONS_SCRIPT, elem_id="cells")
        with gr.Row():
            first = gr.Dropdown([], label="Method", elem_id="first")
            second = gr.Dropdown([], label="Compared with", elem_id="second")
            condition = gr.Dropdown([], label="Under", elem_id="condition")
        listed = Html(js_on_load=BUTTONS_SCRIPT, elem_id="disagreements")
        one = Html(elem_id="disagreement")
        pair, filters = [first, second, condition], [name, corruption, budget]
        shown, opened = [curves, cells, *pair, one], [corruption, budget, notes]
        picked = [board, model, keep, setting]
        tab.select(self.boards, board, [*picked, ranked])
        board.input(self.choose_board, board, [*picked[1:], ranked])
        for choice in picked[1:]:
            choice.input(self.rank, picked, ranked)
        listing = tab.select(self.refresh, name, [name, notes])
        listing.then(self.open, name, opened, **HIDDEN).then(self.show, filters, shown)
        name.input(self.open, name, opened).then(self.show, filters, shown)
        for choice in (corruption, budget):
            choice.input(self.show, filters, shown)
        cells.select(self.jump, filters, [cells, *pair, one], **HIDDEN)
        for choice in pair:
            choice.change(self.compare, [name, *pair], [listed, one], **HIDDEN)
        listed.select(self.question, [name, *pair], one, **MODEL_QUEUE)

    def boards(self, board: str) -> tuple[Any, ...]:
        """List what has a leaderboard: the stored one, and every run."""
        names = [*([STORED] if stored_entries() else []), *self.library.names()]
        value = board if board in names else next(iter(names), None)
        return gr.Dropdown(names, value=value), *self.choose_board(value)

    def choose_board(self, board: str | None) -> tuple[Any, ...]:
        try:
            entries = self._entries(board)
        except ValueError as error:
            return *[gr.Dropdown([EVERY], value=EVERY)] * 3, error_line(error)
        models = list(dict.fromkeys(f"{one.model} on {one.task}" for one in entries))
        budgets = list(dict.fromkeys(str(one.keep) for one in entries if one.keep is not None))
        settings = list(dict.fromkeys(one.setting for one in entries if one.keep is not None))
        filters = [gr.Dropdown([EVERY, *found], value=EVERY) for found in (models, budgets, settings)]
        return *filters, self.rank(board, EVERY, EVERY, EVERY)

    def rank(self, board: str | None, model: str, keep: str, setting: str) -> str:
        """Show the leaderboard of some entries; the unpruned model is always among them."""
        wanted = [
            one
            for one in self._entries(board)
            if model in (EVERY, f"{one.model} on {one.task}")
            and (one.keep is None or (keep in (EVERY, str(one.keep)) and setting in (EVERY, one.setting)))
        ]
        if not any(one.keep is not None for one in wanted):
            return markup.render("notice", text="No method has this budget in this setting.")
        return markup.board(wanted, None if model == EVERY else model)

    def _entries(self, board: str | None) -> list[Entry]:
        if board is None:
            raise ValueError("there is no run yet, and no stored leaderboard")
        return stored_entries() if board == STORED else spelled(read_entries([self.library.open(board).folder]))

    def refresh(self, name: str | None) -> tuple[Any, Any]:
        names = self.library.names()
        value = name if name in names else next(iter(names), None)
        folder = self.library.folder
        note = "" if names else f"There is no run under {folder} yet: clustrs eval --output {folder}/NAME writes one."
        return gr.Dropdown(names, value=value), notice(note)

    def open(self, name: str | None) -> tuple[Any, Any, Any]:
        empty = gr.Dropdown([], value=None)
        if not name:
            return empty, empty, gr.skip()
        try:
            opened = self.library.open(name)
        except ValueError as error:
            return empty, empty, notice(str(error))
        corruptions, budgets = opened.corruptions(), list(opened.run.budgets)
        return gr.Dropdown(corruptions, value=corruptions[0]), gr.Dropdown(budgets, value=budgets[0]), notice("")

    def show(self, name: str | None, corruption: str | None, budget: str | None) -> tuple[Any, ...]:
        """Show curves, table, and the first pair of methods to compare, under the most severe level."""
        if not name or not corruption or not budget:
            return "", "", *[gr.Dropdown([], value=None)] * 3, ""
        opened = self.library.open(name)
        methods = opened.methods(budget)
        first = next((m for m in methods if opened.run.methods[m].name == OURS), methods[0])
        pair = self._pair(opened, corruption, budget, first, opened.conditions(corruption)[-1])
        return markup.curves(opened, corruption, budget), markup.cells(opened, corruption, budget), *pair, ""

    def jump(self, event: gr.EventData, name: str, corruption: str, budget: str) -> tuple[Any, ...]:
        """Go from a number in the table to the questions behind it."""
        opened = self.library.open(name)
        chosen = int(event._data["method"]), int(event._data["condition"])
        if chosen[0] not in opened.methods(budget) or chosen[1] not in opened.conditions(corruption):
            raise ValueError("this number is not in the table any more: choose another")
        cells = markup.cells(opened, corruption, budget, chosen)
        return cells, *self._pair(opened, corruption, budget, *chosen), ""

    def compare(self, name: str, first: Any, second: Any, condition: Any) -> tuple[str, str]:
        if None in (name, first, second, condition):
            return "", ""
        opened = self.library.open(name)
        found = disagreements(opened, first, second, condition)
        label, under = opened.summary.label, str(opened.run.conditions[condition])
        return markup.disagreement_list(found, label(first), label(second), under), ""

    def question(self, event: gr.EventData, name: str, first: int, second: int, condition: int) -> str:
        """Show one of those questions, with its image and what each method kept of it."""
        opened = self.library.open(name)
        found = disagreements(opened, first, second, condition)
        index = int(event._data["index"])
        if not 0 <= index < len(found):
            raise ValueError("this question is not in the list any more: choose another")
        try:
            pictures, note = kept_images(self.loaded, opened, found[index])
        except Exception as error:  # a task may be somebody else's, and its images may be gone
            pictures, note = [None, None], f"The image cannot be shown: {first_sentence(error)}"
        return markup.disagreement(found[index], pictures, note)

    def _pair(self, opened: OpenRun, corruption: str, budget: str, first: int, condition: int) -> list[Any]:
        methods = [(opened.summary.label(m), m) for m in opened.methods(budget)]
        conditions = [(str(opened.run.conditions[c]), c) for c in opened.conditions(corruption)]
        pair = (first, opened.rival(budget, first))
        return [*(gr.Dropdown(methods, value=one) for one in pair), gr.Dropdown(conditions, value=condition)]
