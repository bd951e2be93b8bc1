"""Modules that can be traced: the vision part of a model with its pruning, and the selection alone."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from clustrs import validation
from clustrs.export.encoders import CropTokens, encoder_of, image_size, vision_parts
from clustrs.models import scoring
from clustrs.models.adapters import get_adapter
from clustrs.models.attach import MARK, unwrap
from clustrs.pruners import Pruner
from clustrs.pruners.selection import EncoderStates

METHODS = ("clustrs", "denoise", "divprune", "fastervlm", "grid", "none", "random", "vispruner")
"""The methods that can be exported."""
EXAMPLES = 2
"""Images in the batch that is traced: with one, the graph would be for batches of one."""


class PrunedVision(nn.Module):
    """Vision tower, scoring, projector and selection of a model: pixels [B, 3, H, W] to tokens [B, k, D] and their
    indices [B, k] among the N tokens of a crop.

    The image is one crop of the model's fixed size: the whole image for LLaVA-1.5, Gemma 3 and PaliGemma, the base crop
    of LLaVA-NeXT and LLaVA-OneVision, a tile of InternVL, a crop of SmolVLM and Idefics3.
    """

    def __init__(self, model: Any, method: Pruner) -> None:
        super().__init__()
        check_exportable(method)
        model = unwrap(model)
        if MARK in model.__dict__:
            raise ValueError("a method is attached to this model: remove it first (handle.remove())")
        self.method, self.adapter = method, get_adapter(model)
        self.encoder = encoder_of(self.adapter)
        self.parts = vision_parts(self.adapter).eval()
        constants = self.encoder.constants(self.adapter)
        self.constants = tuple(constants)
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def model_type(self) -> str:
        """The family of the model."""
        return str(self.adapter.config.model_type)

    def encode(self, pixel_values: Tensor) -> CropTokens:
        """All tokens of the crops, and their scores."""
        constants = {name: getattr(self, name) for name in self.constants}
        return self.encoder.encode(self.adapter, pixel_values, **constants)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        crops = self.encode(pixel_values)
        states = EncoderStates(crops.hidden, cls=crops.cls)
        selection = self.method.select(crops.tokens, crops.scores, states, check=False)
        return selection.tokens, selection.indices

    def example_inputs(self, batch: int = EXAMPLES) -> dict[str, Tensor]:
        """Black images, to trace with."""
        weight = next(self.parts.parameters())
        return {"pixel_values": torch.zeros(batch, 3, *image_size(self.adapter), dtype=weight.dtype)}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Let the tower's attention be heard while it is traced."""
        with scoring.listening(self.adapter.listened_layer()):
            yield


class TokenSelection(nn.Module):
    """The selection alone: tokens [B, N, D] and the encoder's attention to them [B, N] to tokens [B, k, D] and their
    indices [B, k].

    tokens: N. dim: D. hidden_dim: width of the hidden states [B, N, H] that VisPruner compares; others take none.
    cls: whether the attention is that of a CLS token; if not, ClustRS adds salience.
    """

    def __init__(
        self, method: Pruner, tokens: int, dim: int, *, hidden_dim: int | None = None, cls: bool = True
    ) -> None:
        super().__init__()
        check_exportable(method)
        validation.integer("tokens", tokens, 1)
        validation.integer("dim", dim, 1)
        if method.count(tokens) == tokens:
            raise ValueError(
                f"keep={method.keep!r}: of {tokens} tokens that is all, there is nothing to select; keep fewer"
            )
        needs_hidden = "hidden" in method.requirements()
        if needs_hidden != (hidden_dim is not None):
            wanted = "give the width of the hidden states" if needs_hidden else "leave it out"
            raise ValueError(f"hidden_dim={hidden_dim!r}: {method.name} compares {_compared(needs_hidden)}, {wanted}")
        if hidden_dim is not None:
            validation.integer("hidden_dim", hidden_dim, 1)
        self.method, self.tokens, self.dim, self.hidden_dim, self.cls = method, tokens, dim, hidden_dim, cls

    def forward(
        self, tokens: Tensor, attention: Tensor | None = None, hidden_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden_states
        if hidden is not None and self.cls:  # methods skip the place of the CLS token
            hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)
        states = EncoderStates(hidden, cls=self.cls)
        selection = self.method.select(tokens, attention, states, check=False)
        return selection.tokens, selection.indices

    def example_inputs(self, batch: int = EXAMPLES) -> dict[str, Tensor]:
        """Zeros in the shapes of the inputs that the method needs."""
        inputs = {"tokens": torch.zeros(batch, self.tokens, self.dim)}
        if "attention" in self.method.requirements():
            inputs["attention"] = torch.zeros(batch, self.tokens)
        if self.hidden_dim is not None:
            inputs["hidden_states"] = torch.zeros(batch, self.tokens, self.hidden_dim)
        return inputs

    def tracing(self) -> Any:
        """Nothing has to be prepared."""
        return nullcontext()


def _compared(hidden: bool) -> str:
    return "hidden states" if hidden else "no hidden states"


def check_exportable(method: Pruner) -> None:
    """Refuse methods that no graph was made of; a method that wraps another is as good as that one."""
    if method.name not in METHODS:
        raise ValueError(f"method {method.name!r} can't be exported: give one of {', '.join(METHODS)}")
    inner = getattr(method, "inner", None)
    if isinstance(inner, Pruner):
        check_exportable(inner)


def trace(module: PrunedVision | TokenSelection) -> ExportedProgram:
    """The module as `torch.export` sees it, for batches of any size: what ONNX and ExecuTorch start from."""
    inputs = module.example_inputs()
    batch = Dim("batch")
    with torch.no_grad(), module.tracing():
        return torch.export.export(
            module, (), kwargs=inputs, dynamic_shapes={name: {0: batch} for name in inputs}, strict=False
        )
