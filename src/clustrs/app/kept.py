"""The images of a run's questions, with the tokens that were kept of them."""

from pathlib import Path

import torch
from PIL import Image

from clustrs.app.loaded_model import LoadedModel
from clustrs.app.results import Answered, Disagreement, OpenRun
from clustrs.evaluation.config import Config, parse_corruption
from clustrs.evaluation.tasks import Task, get_task
from clustrs.models import shared_encoding
from clustrs.models.adapters import VisualTokens
from clustrs.models.ask import as_seen, chat_prompt
from clustrs.models.draw import overlay_kept
from clustrs.models.load import apply_image_padding
from clustrs.models.select import ImageSelection
from clustrs.pruners.inputs import Selection

LOCAL_TASKS = ("scenes", "photos")
"""Tasks that need no data: their images are drawn, or come with `clustrs-models`."""


def question_image(config: Config, one: Disagreement) -> Image.Image:
    """The image of a question as the model got it. Nothing is downloaded: the task's data must lie on this machine."""
    image = _task(config).open(one.image)
    corruption = parse_corruption(one.corruption)
    return corruption.apply(image, one.image, one.seed) if corruption else image


def kept_images(loaded: LoadedModel, opened: OpenRun, one: Disagreement) -> tuple[list[Image.Image | None], str]:
    """The image with what each of the two methods kept of it, and a line on what cannot be shown.

    Records have the indices of kept tokens, and the model knows where these lie: without the model of the run, the
    image is shown as it is.
    """
    config = Config.from_json(opened.run.config)
    image = question_image(config, one)
    if config.model != loaded.name:
        note = f"The run's model is {config.model}: start clustrs app --model {config.model} to see the kept tokens."
        return [image, image], note
    processor = apply_image_padding(loaded.processor, config.image_padding)
    prompt = chat_prompt(processor, one.question, config.prompt_template)
    with loaded.lock:
        batch = shared_encoding.encode(loaded.model, processor, [image], [(0, prompt)], config.crops)
    shown = as_seen(processor, image)
    return [overlay_kept(shown, _selection(batch.images[0], said), size=480) for said in (one.first, one.second)], ""


def _task(config: Config) -> Task:
    if config.data is None and config.task not in LOCAL_TASKS:
        raise ValueError(f"the data of task {config.task} came from the hub, and this page makes no requests")
    data = None if config.data is None else Path(config.data)
    return get_task(config.task, data, config.limit, **config.task_options)


def _selection(encoded: VisualTokens, said: Answered) -> ImageSelection:
    """What a record says was kept, on the layout of its image; a record without indices kept everything."""
    n = len(encoded.candidates)
    indices = torch.tensor(said.kept or range(n), dtype=torch.long)
    if int(indices.max()) >= n:
        raise ValueError(f"{said.label} kept token {int(indices.max())}, but the image has {n}")
    tokens = encoded.tokens[indices.clamp(min=0).to(encoded.tokens.device)]
    selection = Selection(tokens, indices)
    return ImageSelection(selection, encoded.scores, encoded.layout, encoded.grids, encoded.slots, len(indices))
