"""The three tabs: Try (several methods side by side), Inspect (what a method kept, and why), Results (runs)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from clustrs.app import markup, trial
from clustrs.app.inspection import inspect
from clustrs.app.results import OpenRun, RunLibrary, disagreements, kept_images
from clustrs.app.trial import LoadedModel, Source, TrialAnswer, corrupted, level_range
from clustrs.corruptions import Corruption, list_corruptions
from clustrs.corruptions.images import first_sentence
from clustrs.evaluation.config import CLEAN
from clustrs.evaluation.report.document import data_uri
from clustrs.evaluation.report.scores import OURS
from clustrs.models.ask import as_seen, name_unknown_words
from clustrs.pruners import list_methods

INSPECT_SCRIPT, BUTTONS_SCRIPT = (Path(__file__).with_name(name) for name in ("inspect.js", "buttons.js"))
MODEL_QUEUE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}  # of events that use the model
HIDDEN: dict[str, Any] = {"show_progress": "hidden"}
SHOWN_AT_FIRST = ("clustrs", "fastervlm", "divprune")
KEEP = 16
LONGEST_ANSWER, LONGEST_QUESTION = 512, 2000  # tokens, characters
PRUNING = [(markup.label(name), name) for name in list_methods() if name != trial.NO_PRUNING]
Html = partial(gr.HTML, apply_default_css=False)


def _keep_slider(loaded: LoadedModel, scale: int, elem_id: str) -> gr.Slider:
    most, text = loaded.visual_tokens, "Visual tokens to keep (k)"
    first = loaded.pruning.method.count(most) if loaded.pruning else min(KEEP, most)
    return gr.Slider(1, most, first, step=1, label=text, scale=scale, elem_id=elem_id)


def _caption(source: Source, corruption: str, level: float) -> str:
    return f"{source.name}, {Corruption(corruption, trial.nearest_level(corruption, level))}"


def _notice(text: str) -> Any:
    """A line that stands out; nothing at all where there is nothing to say."""
    return gr.HTML(markup.render("notice", text=text), visible=bool(text))


class TryTab:
    """The first tab: what the unpruned model and each method answer, side by side."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.samples = trial.sample_sources(loaded.embedded.task if loaded.embedded else None)

    def build(self) -> list[Any]:
        """Lay the tab out, inside a `gr.Tab`; return the inputs that describe the image."""
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=300):
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
                upload = gr.File(label="Or your own image", height=130, type="filepath", elem_id="upload")
                notice = Html(visible=False, elem_id="notice")
                with gr.Row():
                    names = [CLEAN, *list_corruptions()]
                    corruption = gr.Dropdown(names, value=CLEAN, label="Corruption", elem_id="corruption")
                    level = gr.Slider(**level_range("gaussian"), label="Level", interactive=False, elem_id="level")
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=80, elem_id="seed")
            with gr.Column(scale=4, min_width=300):
                preview = Html(self.preview(self.samples[0], CLEAN, 0, 0), elem_id="preview")
        inputs = [source, corruption, level, seed]
        questions = [question for question, _ in self.samples[0].questions]
        with gr.Row():
            question = gr.Textbox(questions[0], label="Question", lines=1, max_lines=3, scale=3, elem_id="question")
            known = gr.Dropdown(
                questions, value=questions[0], label="Questions with a known answer", scale=2, elem_id="known"
            )
        shown = (self.loaded.pruning.method.name,) if self.loaded.pruning else SHOWN_AT_FIRST
        methods = gr.CheckboxGroup(
            PRUNING,
            value=[name for name in shown if name in list_methods() and name != trial.NO_PRUNING],
            label="Methods, beside the unpruned model",
            elem_id="methods",
        )
        with gr.Row(equal_height=True):
            keep = _keep_slider(self.loaded, 4, "keep")
            bounds: dict[str, Any] = {"precision": 0, "minimum": 1, "maximum": LONGEST_ANSWER}
            longest = gr.Number(32, label="Longest answer (tokens)", min_width=120, **bounds)
            ask = gr.Button("Ask", variant="primary", scale=1, min_width=140, elem_id="ask")
        status = Html(_status("press Ask to compare them"), elem_id="status", min_height=40)
        with gr.Row(elem_classes="cl-cards", elem_id="answers"):
            cards = [Html(visible=False) for _ in list_methods()]
        chosen: list[Any] = [source, known, question, notice]
        gallery.select(self.choose_sample, None, [*chosen, upload], **HIDDEN)
        upload.upload(self.take_upload, [upload, source], [*chosen, gallery])
        known.input(lambda text: text, known, question, **HIDDEN)
        corruption.change(self.change_corruption, corruption, level, **HIDDEN)
        for event in (source.change, corruption.change, level.change, seed.change):
            event(self.preview, inputs, preview, trigger_mode="always_last", **HIDDEN)
        gr.on(
            [ask.click, question.submit],
            self.answer,
            [*inputs, question, methods, keep, longest],
            [status, *cards],
            **MODEL_QUEUE,
            trigger_mode="once",
            show_progress="full",
            show_progress_on=[status],
        )
        return inputs

    def choose_sample(self, event: gr.SelectData) -> tuple[Any, ...]:
        source = self.samples[int(event.index)]
        return source, *self._questions(source), gr.HTML(visible=False), None

    def take_upload(self, path: str, before: Source) -> tuple[Any, ...]:
        """Return the uploaded image in place of the sample; a file that is refused leaves the image as it was."""
        try:
            source = trial.uploaded(Path(path))
        except ValueError as error:
            text = f"This file was refused. {str(error)[:1].upper()}{str(error)[1:]}."
            return before, gr.skip(), gr.skip(), _notice(text), gr.skip()
        return source, *self._questions(source), gr.HTML(visible=False), gr.Gallery(selected_index=None)

    def _questions(self, source: Source) -> tuple[Any, Any]:
        listed = [question for question, _ in source.questions]
        first = listed[0] if listed else None
        return gr.Dropdown(listed, value=first, interactive=bool(listed)), first or self.loaded.question

    def change_corruption(self, name: str) -> Any:
        return gr.Slider(**({} if name == CLEAN else level_range(name)), interactive=name != CLEAN)

    def preview(self, source: Source, corruption: str, level: float, seed: float) -> str:
        caption = source.name
        if corruption != CLEAN:
            caption = f"{_caption(source, corruption, level)}, seed {int(seed or 0)}"
        picture = data_uri(corrupted(source, corruption, level, int(seed or 0)))
        return markup.render("preview", picture=picture, caption=caption)

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
        """Yield updates of the status line and of one card per method, as the answers grow."""
        _check_question(question)
        status = partial(_status, unknown=name_unknown_words(self.loaded.processor, question))
        image = corrupted(source, corruption, level, int(seed or 0))
        most = min(LONGEST_ANSWER, max(1, int(longest or 1)))
        pruners = trial.trial_methods(self.loaded, methods, int(keep))
        names, unused = [pruner.name for pruner in pruners], len(list_methods()) - len(pruners)
        waiting = [gr.HTML(markup.answer_card(TrialAnswer(name)), visible=True) for name in names]
        yield [status("encoding the image"), *waiting, *[gr.HTML("", visible=False)] * unused]
        shown, expected = as_seen(self.loaded.processor, image), source.expected(question)
        latest: dict[str, TrialAnswer] = {}
        pictures: dict[str, str] = {}  # drawn once for all pieces of an answer
        for answer in trial.run_trial(self.loaded, image, question, pruners, most):
            name = answer.method
            latest[name] = answer
            pictures[name] = pictures.get(name) or markup.kept_picture(shown, answer)
            card = markup.answer_card(answer, pictures[name], expected, list(latest.values()))
            updates: list[Any] = [gr.skip()] * len(list_methods())
            updates[names.index(name)] = gr.HTML(card)
            yield [status(f"{markup.label(name)} is answering"), *updates]
        done = "no answer is known for this question" if expected is None else f"expected answer: {expected}"
        yield [status(done), *[gr.skip()] * len(list_methods())]


def _check_question(question: Any) -> None:
    if not isinstance(question, str) or len(question) > LONGEST_QUESTION:
        raise ValueError(f"question must be a text of at most {LONGEST_QUESTION} characters")


def _status(text: str, unknown: str = "") -> str:
    warning = f"{unknown}: read as unknown, so the answers may mean nothing."
    return (markup.render("notice", text=warning) if unknown else "") + markup.render("status", text=text)


@dataclass(frozen=True)
class InspectTab:
    """The second tab: what a method kept of the image, and why."""

    loaded: LoadedModel

    def build(self, tab: gr.Tab, inputs: list[Any]) -> None:
        """Lay the tab out, inside `tab`; it shows the image that `inputs` of the Try tab describe."""
        with gr.Row(equal_height=True):
            before = [one for one in PRUNING if one[1] in list_methods("encoder")]  # others have no clusters to show
            method = gr.Dropdown(before, value=OURS, label="Method", elem_id="inspect-method")
            keep = _keep_slider(self.loaded, 3, "inspect-keep")
            label = "Question, for methods that read it"
            question = gr.Textbox(self.loaded.question, label=label, scale=2, elem_id="inspect-question")
        view = Html(js_on_load=INSPECT_SCRIPT.read_text(encoding="utf-8"), min_height=80, elem_id="inspection")
        events = [tab.select, method.change, keep.release, question.submit]
        gr.on(events, self.show, [*inputs, method, keep, question], view, **MODEL_QUEUE, trigger_mode="always_last")

    def show(
        self, source: Source, corruption: str, level: float, seed: float, method: str, keep: float, question: str
    ) -> str:
        """Show the clean image, and the corrupted one if the Try tab corrupts it."""
        _check_question(question)
        images = [(f"{source.name}, clean", source.open())]
        if corruption != CLEAN:
            image = corrupted(source, corruption, level, int(seed or 0))
            images.append((_caption(source, corruption, level), image))
        return markup.inspection(inspect(self.loaded, self.loaded.method(method, int(keep)), images, question))


@dataclass(frozen=True)
class ResultsTab:
    """The third tab: a run's curves and tables, and the questions on which two methods disagree."""

    loaded: LoadedModel
    library: RunLibrary

    def build(self, tab: gr.Tab) -> None:
        """Lay the tab out, inside `tab`."""
        script = BUTTONS_SCRIPT.read_text(encoding="utf-8")
        with gr.Row():
            name = gr.Dropdown([], label=f"Run under {self.library.folder}", scale=3, elem_id="run")
            corruption = gr.Dropdown([], label="Corruption", elem_id="run-corruption")
            budget = gr.Dropdown([], label="Kept tokens (k)", elem_id="run-keep")
        notice = Html(visible=False, elem_id="run-notice")
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300):
                curves = Html(elem_id="curves")
            with gr.Column(scale=3, min_width=300):
                cells = Html(js_on_load=script, elem_id="cells")
        with gr.Row():
            first = gr.Dropdown([], label="Method", elem_id="first")
            second = gr.Dropdown([], label="Compared with", elem_id="second")
            condition = gr.Dropdown([], label="Under", elem_id="condition")
        listed = Html(js_on_load=script, elem_id="disagreements")
        one = Html(elem_id="disagreement")
        pair, filters = [first, second, condition], [name, corruption, budget]
        shown, opened = [curves, cells, *pair, one], [corruption, budget, notice]
        listing = tab.select(self.refresh, name, [name, notice])
        listing.then(self.open, name, opened, **HIDDEN).then(self.show, filters, shown)
        name.input(self.open, name, opened).then(self.show, filters, shown)
        for choice in (corruption, budget):
            choice.input(self.show, filters, shown)
        cells.select(self.jump, filters, [cells, *pair, one], **HIDDEN)
        for choice in pair:
            choice.change(self.compare, [name, *pair], [listed, one], **HIDDEN)
        listed.select(self.question, [name, *pair], one, **MODEL_QUEUE)

    def refresh(self, name: str | None) -> tuple[Any, Any]:
        names = self.library.names()
        value = name if name in names else next(iter(names), None)
        folder = self.library.folder
        note = "" if names else f"There is no run under {folder} yet: clustrs eval --output {folder}/NAME writes one."
        return gr.Dropdown(names, value=value), _notice(note)

    def open(self, name: str | None) -> tuple[Any, Any, Any]:
        empty = gr.Dropdown([], value=None)
        if not name:
            return empty, empty, gr.skip()
        try:
            opened = self.library.open(name)
        except ValueError as error:
            return empty, empty, _notice(str(error))
        corruptions, budgets = opened.corruptions(), list(opened.run.budgets)
        return gr.Dropdown(corruptions, value=corruptions[0]), gr.Dropdown(budgets, value=budgets[0]), _notice("")

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
