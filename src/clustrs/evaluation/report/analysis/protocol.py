"""What a run's configuration says about the words and the pixels that the model was given."""

from collections.abc import Mapping
from typing import Any

PROMPTS = {
    "checkpoint": "the checkpoint's own chat template",
    "vicuna_v1": "LLaVA-1.5's template vicuna_v1 with its system line",
}
PADDINGS = {
    "checkpoint": "fitted as the checkpoint's processor does",
    "square": "padded to a square with the mean colour",
}


def protocol_sentence(config: Mapping[str, Any]) -> str:
    """Return a sentence on prompt and images; what an imported or older run does not say is unknown."""
    prompt = PROMPTS.get(str(config.get("prompt_template")), "unknown")
    padding = PADDINGS.get(str(config.get("image_padding")), "fitted in an unknown way")
    return f"Prompt: {prompt}. Images: {padding}."
