"""The first tab: an image, a corruption, a question; what the unpruned model and each method answer, side by side."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from clustrs.app import markup
from clustrs.app.loaded_model import LoadedModel
from clustrs.app.source import (
    Source,
    corrupted,
    level_range,
    nearest_level,
    sample_sources,
    uploaded,
)
from clustrs.app.trial import NO_PRUNING, Trial, TrialAnswer, run_trial
from clustrs.corruptions import Corruption, list_corruptions
from clustrs.corruptions.images import first_sentence
from clustrs.evaluation.config import CLEAN
from clustrs.models.ask import as_seen, name_unknown_words
from clustrs.pruners import list_methods

MODEL_QUEUE = "model"
"""What uses the model waits in one line."""
SHOWN_AT_FIRST = ("clustrs", "fastervlm", "divprune")
KEEP = 16
LONGEST_ANSWER = 512
LONGEST_QUESTION = 2000
"""Characters."""
OWN_QUESTION = "What is in the image?"


@dataclass(frozen=True)
class ImageInputs:
    """The components that say which image the model gets; the Inspect tab reads them too."""

    source: gr.State
    corruption: gr.Dropdown
    level: gr.Slider
    seed: gr.Number

    def listed(self) -> list[Any]:
        return [self.source, self.corruption, self.level, self.seed]


def level_settings(corruption: str) -> dict[str, float]:
    """A slider's settings for the levels of a corruption."""
    span = level_range(corruption)
    return {"minimum": span.minimum, "maximum": span.maximum, "step": span.step, "value": span.start}


class TryTab:
    """Lays the tab out and answers its events."""

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
            concurrency_id=MODEL_QUEUE,
            concurrency_limit=1,
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
            level = gr.Slider(**level_settings("gaussian"), label="Level", interactive=False, elem_id="level")
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
        """The sample that was clicked: it, its questions, its first question, no notice, no upload."""
        source = self.samples[int(event.index)]
        return source, *self._questions(source), gr.HTML(visible=False), None

    def take_upload(self, path: str, before: Source) -> tuple[Any, ...]:
        """The uploaded image in place of the sample; a file that is refused leaves the image as it was."""
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
        """The slider for a corruption's levels."""
        if name == CLEAN:
            return gr.Slider(interactive=False)
        return gr.Slider(**level_settings(name), interactive=True)

    def preview(self, source: Source, corruption: str, level: float, seed: float) -> str:
        """The image as the model gets it."""
        caption = source.name
        if corruption != CLEAN:
            caption += f", {Corruption(corruption, nearest_level(corruption, level))}, seed {int(seed or 0)}"
        try:
            return markup.preview(corrupted(source, corruption, level, int(seed or 0)), caption)
        except ValueError as error:
            raise gr.Error(first_sentence(error), print_exception=False) from None

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
        """Updates of the status line and of one card per method, as the answers grow. Words of the question that the
        model does not know are named above the status."""
        if not isinstance(question, str) or len(question) > LONGEST_QUESTION:
            raise gr.Error(f"question must be a text of at most {LONGEST_QUESTION} characters", print_exception=False)
        unknown = name_unknown_words(self.loaded.processor, question)
        try:
            image = corrupted(source, corruption, level, int(seed or 0))
            most = min(LONGEST_ANSWER, max(1, int(longest or 1)))
            trial = Trial(image, question, tuple(methods), int(keep), most)
            names = [pruner.name for pruner in trial.pruners()]
            yield [_status("encoding the image", unknown), *self._fresh_cards(names)]
            shown = as_seen(self.loaded.processor, image)
            latest: dict[str, TrialAnswer] = {}
            pictures: dict[str, str] = {}  # drawn once for all pieces of an answer
            for answer in run_trial(self.loaded, trial):
                latest[answer.method] = answer
                picture = pictures.get(answer.method) or markup.kept_picture(shown, answer)
                pictures[answer.method] = picture
                card = markup.answer_card(answer, picture, source.expected(question), list(latest.values()))
                updates = [gr.HTML(card) if name == answer.method else gr.skip() for name in names]
                rest: list[Any] = [gr.skip()] * (len(list_methods()) - len(names))
                yield [_status(f"{markup.label(answer.method)} is answering", unknown), *updates, *rest]
        except ValueError as error:
            raise gr.Error(first_sentence(error), print_exception=False) from None
        expected = source.expected(question)
        done = "no answer is known for this question" if expected is None else f"expected answer: {expected}"
        yield [_status(done, unknown), *[gr.skip()] * len(list_methods())]

    def _fresh_cards(self, names: list[str]) -> list[Any]:
        hidden = [gr.HTML("", visible=False)] * (len(list_methods()) - len(names))
        return [*(gr.HTML(markup.waiting_card(name), visible=True) for name in names), *hidden]


def _status(text: str, unknown: str = "") -> str:
    status = markup.render("status", text=text)
    warning = f"{unknown}: read as unknown, so the answers may mean nothing."
    return markup.render("notice", text=warning) + status if unknown else status
