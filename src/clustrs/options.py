"""The choices that the whole package knows, by name. Nothing here needs torch."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

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
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
"""The type of a model's weights; "auto" is the checkpoint's own."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded. Configs and commands that load one derive from this, so that all have the same fields."""

    device: str | None = field(
        default=None,
        metadata={"help": "cpu, cuda, cuda:1, mps ... (default: an accelerator if there is one)", "metavar": "DEVICE"},
    )
    dtype: Dtype | None = field(
        default=None,
        metadata={"help": "type of the weights (default: float32 on a CPU, the checkpoint's own elsewhere)"},
    )
    attn: str | None = field(
        default=None,
        metadata={
            "help": "attention implementation: sdpa, eager, flash_attention_2 ... (default: transformers' choice)",
            "metavar": "NAME",
        },
    )
    load_in_8bit: bool = field(
        default=False, metadata={"help": "quantise to 8 bits (needs bitsandbytes or torchao)", "flag": "--load-in-8bit"}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "quantise to 4 bits (needs bitsandbytes or torchao)", "flag": "--load-in-4bit"}
    )
    device_map: str | None = field(
        default=None,
        metadata={"help": "spread the model over devices: auto, balanced ... (needs accelerate)", "metavar": "MAP"},
    )

    def load_options(self) -> "LoadOptions":
        """These options alone, without what a class that derives from this adds."""
        return LoadOptions(**{one.name: getattr(self, one.name) for one in fields(LoadOptions)})

    def given(self) -> dict[str, Any]:
        """The options that are not at their defaults, by name."""
        return {one.name: value for one in fields(LoadOptions) if (value := getattr(self, one.name)) != one.default}
