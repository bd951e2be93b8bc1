"""The first tab, Try: the unpruned model and methods answer a question about an image or a clip, side by side."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from clustrs.app import markup, trial
from clustrs.app.trial import LoadedModel, Source, TrialAnswer, corrupted, level_range
from clustrs.corruptions import Corruption, list_corruptions
from clustrs.corruptions.images import first_sentence
from clustrs.evaluation.config import CLEAN
from clustrs.models.ask import as_seen, name_unknown_words
from clustrs.pruners import list_methods

HERE = Path(__file__).parent
BUTTONS_SCRIPT, FRAMES_SCRIPT = ((HERE / name).read_text(encoding="utf-8") for name in ("buttons.js", "frames.js"))
MODEL_QUEUE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}  # of events that use the model
HIDDEN: dict[str, Any] = {"show_progress": "hidden"}
SHOWN_AT_FIRST = ("clustermeans",)
KEEP = 64
LONGEST_ANSWER, LONGEST_QUESTION = 512, 2000  # tokens, characters
PRUNING = [(markup.label(name), name) for name in list_methods() if name != trial.NO_PRUNING]
Html = partial(gr.HTML, apply_default_css=False)
TO_RESULT = """() => {
  document.querySelector('#answers').classList.remove('cl-outdated');
  if (innerWidth < 760) document.querySelector('#result').scrollIntoView({ behavior: 'smooth' });
}"""
OUTDATED = "() => document.querySelector('#answers').classList.add('cl-outdated')"


def first_keep(loaded: LoadedModel) -> int:
    most = loaded.visual_tokens
    return loaded.pruning.method.count(most) if loaded.pruning else min(KEEP, most)


def keep_slider(loaded: LoadedModel, elem_id: str, scale: int = 1) -> gr.Slider:
    text, first = "Visual tokens to keep (k)", first_keep(loaded)
    return gr.Slider(1, loaded.visual_tokens, first, step=1, label=text, scale=scale, elem_id=elem_id)


def caption(source: Source, corruption: str, level: float) -> str:
    return f"{source.name}, {Corruption(corruption, trial.nearest_level(corruption, level))}"


def notice(text: str) -> Any:
    """A line that stands out; nothing at all where there is nothing to say."""
    return gr.HTML(markup.render("notice", text=text), visible=bool(text))


def error_line(error: Exception) -> str:
    text = first_sentence(error)
    return markup.render("notice", text=f"{text[:1].upper()}{text[1:]}.")


def check_question(question: Any) -> None:
    if not isinstance(question, str) or len(question) > LONGEST_QUESTION:
        raise ValueError(f"question must be a text of at most {LONGEST_QUESTION} characters")


def _status(text: str, unknown: str = "") -> str:
    warning = f"{unknown}: read as unknown, so the answers may mean nothing."
    return (markup.render("notice", text=warning) if unknown else "") + markup.render("status", text=text)


class TryTab:
    """The first tab; it opens with answers to the first question about the first sample, which are measured here."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.samples = trial.sample_sources(loaded)
        self.thumbnails = [(source.name.split(".")[0], markup.thumbnail(source.open())) for source in self.samples]
        shown = (loaded.pruning.method.name,) if loaded.pruning else SHOWN_AT_FIRST
        self.shown = [name for name in shown if name != trial.NO_PRUNING]

    def build(self) -> list[Any]:
        """Lay the tab out, inside a `gr.Tab`; return the inputs that describe the image."""
        first, name = self.samples[0], self.loaded.name
        asked = self._question(first)
        with gr.Row(equal_height=True, elem_id="ask-row"):
            bare: dict[str, Any] = {"show_label": False, "container": False, "scale": 6, "elem_id": "question"}
            question = gr.Textbox(asked, label="Question", placeholder="Ask about the image", max_lines=3, **bare)
            ask = gr.Button("Ask", variant="primary", scale=1, min_width=110, elem_id="ask")
        known = Html(self._known(first), js_on_load=BUTTONS_SCRIPT, elem_id="known")
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=300):
                source = gr.State(first)
                preview = Html(self.preview(first, CLEAN, 0, 0), elem_id="preview")
                samples = Html(self._samples(0), js_on_load=BUTTONS_SCRIPT, elem_id="samples")
                kinds = ["image"] if self.loaded.one_image else ["image", "video"]
                title = "Upload an image" if self.loaded.one_image else "Upload an image or a clip"
                with gr.Row(elem_id="upload"):
                    upload = gr.UploadButton(title, file_types=kinds, size="sm")
                if self.loaded.one_image:
                    Html(f'<p class="cl-sub">{self.loaded.one_image}</p>')
                with gr.Row():
                    names, narrow = [CLEAN, *list_corruptions()], {"min_width": 120}
                    corruption = gr.Dropdown(names, value=CLEAN, label="Corruption", elem_id="corruption", **narrow)
                    span = level_range("gaussian", name)
                    level = gr.Slider(**span, label="Level", interactive=False, elem_id="level", **narrow)
                keep = keep_slider(self.loaded, "keep")
            with gr.Column(scale=6, min_width=300, elem_id="result"):
                said, opening = self._opening(first, asked)
                status = Html(said, elem_id="status", min_height=36)
                frames = Html(self._frames(first), js_on_load=FRAMES_SCRIPT, elem_id="frames")
                with gr.Row(elem_classes="cl-cards", elem_id="answers"):
                    hidden = [""] * (len(list_methods()) - len(opening))
                    cards = [Html(card, visible=bool(card)) for card in (*opening, *hidden)]
                with gr.Row(elem_id="draws-row"):
                    count = gr.Button(f"Right in how many of {trial.DRAWS} noise draws?", size="sm", elem_id="draws")
                drawn = Html(elem_id="drawn")
        with gr.Accordion("Methods and advanced options", open=False, elem_id="advanced"):
            methods = gr.CheckboxGroup(
                PRUNING, value=self.shown, label="Methods, beside the unpruned model", elem_id="methods"
            )
            with gr.Row():
                seed = gr.Number(0, label="Seed of the corruption", precision=0, minimum=0, elem_id="seed")
                bounds: dict[str, Any] = {"precision": 0, "minimum": 1, "maximum": LONGEST_ANSWER}
                longest = gr.Number(32, label="Longest answer (tokens)", elem_id="longest", **bounds)
        inputs = [source, corruption, level, seed]
        call: dict[str, Any] = {
            "fn": self.answer,
            "inputs": [*inputs, question, methods, keep, longest],
            "outputs": [status, frames, drawn, *cards],
            **MODEL_QUEUE,
            "show_progress": "full",
            "show_progress_on": [status],
        }
        chosen: list[Any] = [source, known, question, samples]
        picks = [
            samples.select(self.choose_sample, None, chosen, **HIDDEN),
            known.select(self.choose_question, source, question, **HIDDEN),
            upload.upload(self.take_upload, upload, chosen, **HIDDEN),
        ]
        runs = [
            gr.on([ask.click, question.submit], **call, trigger_mode="once"),
            *(one.success(**call) for one in picks),
        ]
        for begin in (ask.click, question.submit, samples.select, known.select, upload.upload):
            begin(None, None, None, js=TO_RESULT)
        for one in runs:
            one.then(None, None, None, js=TO_RESULT)  # again: cards that came or went have moved it
        corruption.change(self.change_corruption, corruption, level, **HIDDEN)
        for change in (source.change, corruption.change, level.change, seed.change):
            change(self.preview, inputs, preview, trigger_mode="always_last", **HIDDEN)
        for setting in (question, corruption, level, keep, methods, seed, longest):
            setting.input(None, None, None, js=OUTDATED)
        count.click(self.draws, call["inputs"], drawn, **MODEL_QUEUE, trigger_mode="once", show_progress="minimal")
        return inputs

    def _question(self, source: Source) -> str:
        return source.questions[0][0] if source.questions else self.loaded.question

    def _known(self, source: Source) -> str:
        return markup.render("questions", questions=[question for question, _ in source.questions])

    def _samples(self, chosen: int | None) -> str:
        return markup.render("samples", samples=self.thumbnails, chosen=chosen)

    def _frames(self, source: Source) -> str:
        return markup.render("frames", count=len(source.frames()))

    def choose_sample(self, event: gr.EventData) -> tuple[Any, ...]:
        index = int(event._data["index"])
        if not 0 <= index < len(self.samples):
            raise ValueError("there is no such sample")
        source = self.samples[index]
        return source, self._known(source), self._question(source), self._samples(index)

    def choose_question(self, event: gr.EventData, source: Source) -> str:
        return source.questions[int(event._data["index"])][0]

    def take_upload(self, path: str) -> tuple[Any, ...]:
        """Return the uploaded file in place of the sample; one that is refused leaves the image as it was."""
        try:
            source = trial.uploaded(Path(path))
            if source.clip and self.loaded.one_image:
                raise ValueError(self.loaded.one_image)
        except ValueError as error:
            text = f"This file was refused. {str(error)[:1].upper()}{str(error)[1:]}."
            raise gr.Error(text, print_exception=False) from None
        return source, self._known(source), self._question(source), self._samples(None)

    def change_corruption(self, name: str) -> Any:
        span = {} if name == CLEAN else level_range(name, self.loaded.name)
        return gr.Slider(**span, interactive=name != CLEAN)

    def preview(self, source: Source, corruption: str, level: float, seed: float) -> str:
        text = source.name
        if corruption != CLEAN:
            text = f"{caption(source, corruption, level)}, seed {int(seed or 0)}"
        return markup.preview(corrupted(source, corruption, level, int(seed or 0)), text)

    def _opening(self, source: Source, question: str) -> tuple[str, list[str]]:
        """Answer the first question, for a page that opens with an answer."""
        keep = first_keep(self.loaded)
        pruners = trial.trial_methods(self.loaded, self.shown, keep)
        list(trial.run_trial(self.loaded, source.frames(), question, pruners, 1))  # pays for what is set up once
        *_, (status, cards) = self._answers(source, source.frames(), question, self.shown, keep, 32)
        return status, cards

    def _answers(
        self, source: Source, images: Sequence[Any], question: str, methods: Sequence[str], keep: int, longest: int
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield a status line and a card per method, as the answers grow."""
        status = partial(_status, unknown=name_unknown_words(self.loaded.processor, question))
        pruners = trial.trial_methods(self.loaded, methods, keep)
        latest = {pruner.name: TrialAnswer(pruner.name) for pruner in pruners}
        cards = {name: markup.answer_card(answer) for name, answer in latest.items()}
        yield status("Encoding the image"), list(cards.values())
        shown = [as_seen(self.loaded.processor, image) for image in images]
        expected, pictures = source.expected(question), dict[Any, list[str]]()  # drawn once for all pieces of an answer
        for answer in trial.run_trial(self.loaded, images, question, pruners, longest):
            name, kept = answer.method, tuple(one.kept for one in answer.images)
            latest[name] = answer
            pictures[name, kept] = pictures.get((name, kept)) or markup.kept_pictures(shown, answer)
            cards[name] = markup.answer_card(answer, pictures[name, kept], expected, list(latest.values()))
            yield status(f"{markup.label(name)} is answering"), list(cards.values())
        done = "No answer is known for this question" if expected is None else f"Expected answer: {expected}"
        yield status(done), list(cards.values())

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
        """Yield updates of the tab as the answers grow; an error takes the cards away and says why."""
        room = len(list_methods())
        try:
            check_question(question)
            images = corrupted(source, corruption, level, int(seed or 0))
            most = min(LONGEST_ANSWER, max(1, int(longest or 1)))
            frames = self._frames(source)
            for status, cards in self._answers(source, images, question, methods, int(keep), most):
                # all of them each time: a browser may drop an update for the next one
                shown = [*cards, *[""] * (room - len(cards))]
                yield [status, frames, "", *(gr.HTML(card, visible=bool(card)) for card in shown)]
        except Exception as error:  # whatever it is, no card may be left waiting
            yield [error_line(error), "", "", *[gr.HTML("", visible=False)] * room]

    def draws(
        self,
        source: Source,
        corruption: str,
        level: float,
        seed: float,
        question: str,
        methods: list[str],
        keep: float,
        longest: float,
    ) -> Iterator[str]:
        """Yield how often each method is right over draws of the noise, since a single draw may flip an answer."""
        try:
            check_question(question)
            if corruption == CLEAN:
                raise ValueError("choose a corruption first, since a clean image has a single draw")
            effect = Corruption(corruption, trial.nearest_level(corruption, level))
            pruners = trial.trial_methods(self.loaded, methods, int(keep))
            most = min(LONGEST_ANSWER, max(1, int(longest or 1)))
            for seen, right in trial.count_right(self.loaded, source, effect, question, pruners, most):
                yield markup.draws(right, seen, str(effect), trial.DRAWS)
        except Exception as error:
            yield error_line(error)
