"""Graphs for other runtimes: pixels in, k visual tokens out, without Python.

Modules for tracing come first: the vision part of a model with its pruning, and the selection alone. ONNX graphs are
written from them, each with a JSON file that describes it.
"""

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from clustrs import __version__, validation
from clustrs.models import scoring
from clustrs.models.adapters.base import Adapter, get_adapter, recorded
from clustrs.models.attach import MARK, unwrap
from clustrs.models.scoring import StageTimer
from clustrs.plugins import install_hint
from clustrs.pruners import Pruner, list_methods, method_class
from clustrs.pruners.inputs import PrunerInputs

OPSET = 18
OUTPUTS = ("image_features", "indices", "sizes")  # the first, like `pixel_values`, is onnxruntime-genai's default
FOLDED_BYTES = 2**24  # larger constants are not computed when the file is written: the draws of the seeding, above all
LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")  # they remark on unused operators, and on folding
EXAMPLES = 2  # images in the batch that is traced: with one, the graph would be for batches of one


def encode_llava(adapter: Any, pixels: Tensor) -> PrunerInputs:
    """LLaVA-1.5, and the base crop of LLaVA-NeXT and LLaVA-OneVision."""
    cls = adapter.check({})
    with adapter.record({}, StageTimer(pixels.device)) as recorder:
        features, states = adapter.run_tower(pixels, {})
    encoded = adapter.crops({}, states, recorder)
    return PrunerInputs(features, encoded.scores, hidden=torch.cat([encoded.cls_hidden, encoded.hidden], 1), cls=cls)


def encode_gemma(adapter: Any, pixels: Tensor) -> PrunerInputs:
    """Gemma 3 and PaliGemma."""
    with scoring.record_scores(adapter.scoring_layer(), "received", StageTimer(pixels.device)) as recorder:
        out = adapter.inner.get_image_features(pixels, return_dict=True)
    scores = adapter.pooled(recorded(recorder)[0][..., None])[..., 0]
    return PrunerInputs(out.pooler_output, scores, hidden=adapter.pooled(out.last_hidden_state), cls=False)


def encode_internvl(adapter: Any, pixels: Tensor) -> PrunerInputs:
    """A tile of InternVL."""
    tiles = adapter.encode_tiles({"pixel_values": pixels}, {}, StageTimer(pixels.device))
    hidden = torch.cat([tiles["cls_hidden"], tiles["hidden"]], 1)
    return PrunerInputs(tiles["features"], tiles["scores"], hidden=hidden)


def encode_idefics3(adapter: Any, pixels: Tensor, position_ids: Tensor) -> PrunerInputs:
    """A crop of SmolVLM or Idefics3 that fills its square: no padding, which the model's own code looks for."""
    tower, timer = adapter.inner.vision_model, StageTimer(pixels.device)
    with scoring.record_scores(adapter.scoring_layer(), adapter.reduction, timer) as recorder:
        patches = tower.embeddings.patch_embedding(pixels).flatten(2).mT
        patches = patches + tower.embeddings.position_embedding(position_ids)
        hidden = tower.post_layernorm(tower.encoder(inputs_embeds=patches, attention_mask=None).last_hidden_state)
    scores = adapter.shuffle(recorded(recorder)[0][..., None]).mean(-1)
    return PrunerInputs(adapter.inner.connector(hidden), scores, hidden=adapter.shuffle(hidden), cls=False)


def full_positions(adapter: Any) -> Tensor:
    """Return the position ids [P] that the model's own code, with its rounding, gives a crop without padding."""
    embeddings = adapter.inner.vision_model.embeddings
    weight, side = embeddings.patch_embedding.weight, embeddings.num_patches_per_side
    seen: list[Tensor] = []
    hook = embeddings.position_embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    pixels = weight.new_zeros(1, 3, embeddings.image_size, embeddings.image_size)
    try:
        with torch.no_grad():
            embeddings(pixels, patch_attention_mask=torch.ones(1, side, side, dtype=torch.bool, device=weight.device))
    finally:
        hook.remove()
    return seen[0]


ENCODERS: dict[str, Callable[..., PrunerInputs]] = {  # by model type: the families whose crops have one fixed size
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), encode_llava),
    **dict.fromkeys(("gemma3", "paligemma"), encode_gemma),
    "internvl": encode_internvl,
    **dict.fromkeys(("idefics3", "smolvlm"), encode_idefics3),
}


def encoder_of(adapter: Adapter) -> Callable[..., PrunerInputs]:
    """Return the encoder of a model's family; families whose images vary in size are refused."""
    kind = adapter.config.model_type
    if kind not in ENCODERS:
        known = ", ".join(ENCODERS)
        raise ValueError(f"model type {kind!r} has no crops of a fixed size to export (supported: {known})")
    return ENCODERS[kind]


class PrunedGraph(nn.Module):
    """Base class of the modules: a method that can be exported, and its outputs."""

    def __init__(self, method: Pruner) -> None:
        super().__init__()
        if method.where != "encoder":
            raise ValueError(f"method {method.name!r} cannot be exported: it prunes inside the language model")
        if not method.exportable:
            exportable = ", ".join(name for name in list_methods() if method_class(name).exportable)
            raise ValueError(f"method {method.name!r} cannot be exported (exportable: {exportable})")
        self.method = method

    def prune(self, inputs: PrunerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens [B, k, D], their indices [B, k] and their sizes [B, k]."""
        selection = self.method.select(inputs, sizes=True, check=False)
        assert selection.sizes is not None
        return selection.tokens, selection.indices, selection.sizes


class PrunedVision(PrunedGraph):
    """Vision tower, scoring, projector and selection of a model: pixels [B, 3, H, W] to tokens [B, k, D], their indices
    [B, k] among the N tokens of a crop, and how many of these [B, k] each stands for."""

    def __init__(self, model: Any, method: Pruner) -> None:
        super().__init__(method)
        model = unwrap(model)
        if MARK in model.__dict__:
            raise ValueError("a method is attached to this model: remove it first (handle.remove())")
        self.adapter = get_adapter(model)
        self.encoder = encoder_of(self.adapter)
        self.model_type = str(self.adapter.config.model_type)
        own_positions = self.encoder is encode_idefics3
        names = ("vision_model", "connector") if own_positions else ("vision_tower", "multi_modal_projector")
        # The modules that the encoder calls: a graph holds their weights and not the language model's.
        self.parts = nn.ModuleDict({name: getattr(self.adapter.inner, name) for name in names}).eval()
        self.register_buffer("position_ids", full_positions(self.adapter) if own_positions else None, persistent=False)

    def encode(self, pixel_values: Tensor) -> PrunerInputs:
        constants = () if self.position_ids is None else (self.position_ids,)
        return self.encoder(self.adapter, pixel_values, *constants)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.prune(self.encode(pixel_values))

    def example_inputs(self, batch: int = EXAMPLES) -> dict[str, Tensor]:
        size = self.adapter.config.vision_config.image_size
        sides = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(batch, 3, *sides, dtype=next(self.parts.parameters()).dtype)}


class TokenSelection(PrunedGraph):
    """The selection alone: tokens [B, N, D] and the encoder's attention to them [B, N] to tokens [B, k, D], their
    indices [B, k] and their sizes [B, k].

    tokens: N. dim: D. hidden_dim: width of the hidden states [B, N, H] that VisPruner compares; others take none.
    cls: whether the attention is that of a CLS token; if not, ClustRS adds salience.
    """

    def __init__(
        self, method: Pruner, tokens: int, dim: int, *, hidden_dim: int | None = None, cls: bool = True
    ) -> None:
        super().__init__(method)
        needs_hidden = "hidden" in method.requirements()
        if needs_hidden != (hidden_dim is not None):
            wanted = "the width of the hidden states it compares" if needs_hidden else "None, it uses no hidden states"
            raise ValueError(f"hidden_dim for {method.name} must be {wanted}, got {hidden_dim!r}")
        for name, value in {"tokens": tokens, "dim": dim, "hidden_dim": hidden_dim}.items():
            if value is not None:
                validation.integer(name, value, 1)
        if method.count(tokens) == tokens:
            raise ValueError(f"keep must be fewer than all {tokens} tokens, got {method.keep!r}")
        self.tokens, self.dim, self.hidden_dim, self.cls = tokens, dim, hidden_dim, cls

    def forward(
        self, tokens: Tensor, attention: Tensor | None = None, hidden_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden_states
        if hidden is not None and self.cls:  # methods skip the place of the CLS token
            hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)
        return self.prune(PrunerInputs(tokens, attention, hidden=hidden, cls=self.cls))

    def example_inputs(self, batch: int = EXAMPLES) -> dict[str, Tensor]:
        inputs = {"tokens": torch.zeros(batch, self.tokens, self.dim)}
        if "scores" in self.method.requirements():
            inputs["attention"] = torch.zeros(batch, self.tokens)
        if self.hidden_dim is not None:
            inputs["hidden_states"] = torch.zeros(batch, self.tokens, self.hidden_dim)
        return inputs


def trace(module: PrunedVision | TokenSelection) -> ExportedProgram:
    """Export a module with `torch.export` for batches of any size, for ONNX and ExecuTorch."""
    inputs, batch = module.example_inputs(), Dim("batch")
    shapes = {name: {0: batch} for name in inputs}
    hooks = scoring.Hook(module.adapter.scoring_layer()) if isinstance(module, PrunedVision) else nullcontext()
    with torch.no_grad(), hooks:
        return torch.export.export(module, (), kwargs=inputs, dynamic_shapes=shapes, strict=False)


@dataclass(frozen=True)
class GraphInfo:
    """Contents of the JSON file beside a graph that keeps k (`kept`) of N `tokens`; "batch" is any number of images."""

    method: dict[str, Any]
    tokens: int
    kept: int
    dim: int
    dtype: str
    inputs: dict[str, list[str | int]]
    outputs: dict[str, list[str | int]]
    model_type: str | None
    opset: int
    versions: dict[str, str]


def export_onnx(model: Any, method: Pruner, path: str | Path) -> GraphInfo:
    """Write tower, scoring, projector and selection of a model as one ONNX graph, and PATH with .json beside it.

    The graph takes `pixel_values` [batch, 3, H, W], as the model's processor prepares one crop, in the model's type; it
    returns `image_features` [batch, k, D], which the language model reads in place of all N tokens, `indices`
    [batch, k] of the tokens they stand for, and `sizes` [batch, k], how many tokens each stands for.
    """
    return _write(PrunedVision(model, method), Path(path))


def export_selection(
    method: Pruner, path: str | Path, *, tokens: int, dim: int, hidden_dim: int | None = None, cls: bool = True
) -> GraphInfo:
    """Write the selection alone as an ONNX graph, and PATH with .json beside it.

    The graph takes `tokens` [batch, N, D], where the method needs it `attention` [batch, N], and for VisPruner
    `hidden_states` [batch, N, H]; it returns what that of `export_onnx` does. All are float32.
    """
    return _write(TokenSelection(method, tokens, dim, hidden_dim=hidden_dim, cls=cls), Path(path))


def _write(module: PrunedVision | TokenSelection, path: Path) -> GraphInfo:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: {install_hint('onnx')}") from None
    if path.suffix != ".onnx":
        raise ValueError(f"path must end in .onnx, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    info = _describe(module)
    _convert(module).save(path)
    path.with_suffix(".json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


def _describe(module: PrunedVision | TokenSelection) -> GraphInfo:
    """Describe a graph from one run with the example inputs."""
    inputs = module.example_inputs(1)
    vision = module if isinstance(module, PrunedVision) else None
    with torch.no_grad():
        _, n, dim = (inputs["tokens"] if vision is None else vision.encode(**inputs).tokens).shape
    kept = module.method.count(n)
    packages = ("torch", "onnx", "onnxscript", *(("transformers",) if vision else ()))
    return GraphInfo(
        method=module.method.to_dict(),
        tokens=n,
        kept=kept,
        dim=dim,
        dtype=str(next(iter(inputs.values())).dtype).removeprefix("torch."),
        inputs={name: ["batch", *value.shape[1:]] for name, value in inputs.items()},
        outputs=dict(zip(OUTPUTS, (["batch", kept, dim], ["batch", kept], ["batch", kept]), strict=True)),
        model_type=None if vision is None else vision.model_type,
        opset=OPSET,
        versions={"clustrs": __version__, **{name: version(name) for name in packages}},
    )


def _convert(module: PrunedVision | TokenSelection) -> Any:
    """Convert to an `ONNXProgram` with its constants folded and nothing of this machine in it."""
    from onnxscript import opset18 as op
    from onnxscript import optimizer

    def stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        """An operator that `torch.onnx` does not know. ONNX says that TopK puts the lower index first among equals."""
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        program: Any = torch.onnx.export(
            trace(module),
            (),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(module.example_inputs()),
            output_names=list(OUTPUTS),
            custom_translation_table={torch.ops.aten.sort.stable: stable_sort},
            optimize=False,
            verbose=False,
        )
        optimizer.optimize_ir(program.model, input_size_limit=FOLDED_BYTES, output_size_limit=FOLDED_BYTES)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    model, graph = program.model, program.model.graph
    symbol, nodes = graph.inputs[0].shape[0], list(graph)
    values = [*graph.inputs, *graph.initializers.values(), *(out for node in nodes for out in node.outputs)]
    for holder in (model, graph, *nodes, *values):  # notes about the code that was traced hold paths
        holder.metadata_props.clear()
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if size == symbol and not isinstance(size, int):
                value.shape[axis] = "batch"
    model.producer_name, model.producer_version = "clustrs", __version__
    return program
