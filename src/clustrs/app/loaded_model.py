"""The model behind the page: loaded once, warmed up, and used by one visitor at a time."""

import threading
from dataclasses import dataclass, field
from typing import Any

from clustrs import embedded
from clustrs.corruptions.images import open_image
from clustrs.models import shared_encoding
from clustrs.models.ask import chat_prompt
from clustrs.models.load import LoadOptions, load_model, quiet_transformers
from clustrs.pruners import get_method

WARM_UP_QUESTION = "What is in the image?"


@dataclass(frozen=True)
class LoadedModel:
    """A model, its processor, and how many visual tokens the first sample image has without pruning.

    A method is attached to the whole model, so whoever uses it holds `lock`.
    """

    name: str
    model: Any
    processor: Any
    visual_tokens: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def embedded(self) -> embedded.EmbeddedModel | None:
        """What there is to say about the model if it is an embedded one."""
        return embedded.embedded_model(self.name)


def load_warm(name: str = embedded.DEFAULT, options: LoadOptions | None = None) -> LoadedModel:
    """Load whatever `clustrs ask` takes, and let it answer once: the first call pays for what is set up once."""
    quiet_transformers()
    model, processor = load_model(name, options or LoadOptions())
    image = open_image(embedded.samples()[0].path)
    known = embedded.embedded_model(name)
    prompt = chat_prompt(processor, known.question if known else WARM_UP_QUESTION)
    batch = shared_encoding.encode(model, processor, [image], [(0, prompt)])
    reply = shared_encoding.reply(model, processor, batch, get_method("none"), max_new_tokens=2)[0]
    return LoadedModel(name, model, processor, reply.image.placeholders)
