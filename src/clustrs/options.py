"""The choices that the whole package knows, by name. Nothing here needs torch."""

from typing import Literal

Scope = Literal["image", "crop"]
"""One budget for the whole image, or one for each of its crops."""
Crops = Literal["all", "base"]
"""All crops of an image, or the base crop alone."""
Positions = Literal["compact", "original"]
"""Positions of kept tokens: without gaps, or those they had."""
Deepstack = Literal["raw", "shrunk"]
"""Deepstack features of kept tokens: as they are, or shrunk as the tokens are."""
PromptTemplate = Literal["checkpoint", "vicuna_v1"]
"""The words around a question: the model's own chat template, or LLaVA-1.5's with its system line."""
ImagePadding = Literal["checkpoint", "square"]
"""What becomes of an image that is not a square: what the processor does, or padding with the mean colour."""
EngineName = Literal["local", "ray"]
"""Where a run is done."""
