"""Code that all pruned models in vLLM share: placeholders, metrics, and the positions that kept tokens had."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, cached_property
from math import isnan
from reprlib import repr as short_repr
from typing import Any

import torch
from torch import Tensor, nn

from clustrs.models.adapters.base import VisualTokens
from clustrs.models.prompt import PrunedImage
from clustrs.models.scoring import StageTimer, using
from clustrs.models.select import prune_images
from clustrs.pruners.base import Pruner
from clustrs.serving import plugin

MOST_VIDEOS = 10_000  # whose numbers of tokens are remembered for metrics
ANGLES = 4  # length of the rotary table, in multiples of the model's own: as vLLM has it for videos
BASE = 256  # every whole number up to this one is exact in bfloat16 and float16, so offsets travel as digits
DIGITS = 3  # of each offset
KEEP = {"image": "clustrs_keep", "video": "clustrs_keep_video"}  # fields that bring an item's budget to the model
CHANNELS = 3 * DIGITS  # channels behind a kept token's features: three offsets from its image's first position


_budget: ContextVar[int | float | None] = ContextVar("budget", default=None)
"""Budget of the request that this thread processes; None: the server's own."""


class PrunedInfo:
    """Mixin for a family's processing info: k placeholders per image, in caches of their own."""

    ctx: Any
    get_hf_config: Any
    video_extent: Callable[[int, int, Any], int]  # positions of a video at most, from its frames and the extent of one

    @cached_property
    def settings(self) -> plugin.Settings:
        return plugin.read_settings(self.get_hf_config())

    @property
    def method(self) -> Pruner:
        return plugin.with_keep(self.settings.method, _budget.get())

    @property
    def largest(self) -> int | float | None:
        """The largest budget of a request, which memory is profiled with."""
        return None if self.settings.keep_range is None else self.settings.keep_range[1]

    @property
    def model_id(self) -> str:
        """Part of the keys of vLLM's caches, some of which servers may share: other settings, other features."""
        method = json.dumps(self.settings.method.to_dict(), sort_keys=True)
        return f"{super().model_id}|{method}|{self.settings.positions}"  # type: ignore[misc]

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        limits = super().get_supported_mm_limits()  # type: ignore[misc]
        return {"image": limits["image"]}  # a video would not be pruned

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Any:
        with using(_budget, self.largest):
            return super().get_mm_max_tokens_per_item(seq_len, mm_counts)  # type: ignore[misc]

    def check_keep(self, keep: Any) -> None:
        """Refuse a budget that the server does not allow. Only the request that asks for it fails."""
        from vllm.exceptions import VLLMValidationError  # of the client's request, not of the server

        allowed = self.settings.keep_range
        if allowed is None:
            message = "keep is fixed on this server: it was started without --keep-range"
        elif type(keep) is type(allowed[0]) and allowed[0] <= keep <= allowed[1]:
            return
        else:
            kind = "count" if isinstance(allowed[0], int) else "fraction"
            message = f"keep must be a {kind} from {allowed[0]} to {allowed[1]}, got {short_repr(keep)}"
        raise VLLMValidationError(message, parameter="mm_processor_kwargs")

    def get_num_image_tokens(self, **size: Any) -> int:
        candidates = self.count_candidates(**size)
        kept = self.method.count(candidates)
        return self.count_unpruned(**size) if kept == candidates else kept

    def count_unpruned(self, **size: Any) -> int:
        return int(super().get_num_image_tokens(**size))  # type: ignore[misc]

    def count_candidates(self, **size: Any) -> int:
        """Return the number of tokens that a method chooses from; newlines are not among them."""
        return self.count_unpruned(**size)

    def extent(self, mm_kwargs: Any, **size: int) -> int:
        return self.count_unpruned(**size)

    def check_extent(self, images: Any, videos: Any, mm_kwargs: Any) -> None:
        """Refuse a prompt whose positions would outrun the table of angles: pruned, it may hold very many images."""
        extent = 0
        for i in range(len(images)):
            if images.get(i) is not None:
                size = images.get_image_size(i)
                extent += self.extent(mm_kwargs, image_width=size.width, image_height=size.height)
        for i in range(len(videos)):
            if (video := videos.get(i)) is not None:
                frames = video[0] if isinstance(video, tuple) else video  # or with its metadata
                size = type(videos)([frames]).get_frame_size(0)
                side = self.extent({}, image_width=size.width, image_height=size.height)
                extent += self.video_extent(len(frames), side, mm_kwargs)
        length = self.ctx.model_config.max_model_len
        most = ANGLES * self.get_hf_config().get_text_config().max_position_embeddings - length
        if extent > most:
            from vllm.exceptions import VLLMValidationError  # of the client's request, not of the server

            message = f"the images of a prompt span {extent} positions: at most {most} with {length} tokens"
            raise VLLMValidationError(message, parameter="image")


@cache
def counter(name: str, text: str, *labels: str) -> Any:
    """Create a counter that `/metrics` shows besides vLLM's own."""
    from prometheus_client import Counter

    return Counter(f"clustrs:{name}", text, labels)


def count_tokens(before: int, after: int) -> None:
    for when, tokens in (("before", before), ("after", after)):
        text = f"Visual tokens of all images and videos in requests, {when} pruning."
        counter(f"visual_tokens_{when}", text).inc(tokens)


def count_seconds(timer: StageTimer) -> None:
    """Count a step of the encoder, and the seconds of scoring and selection. They are known on a CPU alone: waiting
    for a device would hold up the server."""
    counter("encoder_steps", "Calls of the vision encoder, each for the images of one step.").inc()
    for stage in ("scoring", "selection"):
        if not isnan(timer.seconds[stage]):
            counter(f"{stage}_seconds", f"Seconds of {stage}, on a CPU.").inc(timer.seconds[stage])


class PrunedProcessor:
    """Mixin for a family's multimodal processor: the budget of each request, and metrics without dummy inputs."""

    info: Any
    counting = True

    def get_dummy_mm_inputs(self, *args: Any, **options: Any) -> Any:
        self.counting = False
        try:
            with using(_budget, self.info.largest):
                return super().get_dummy_mm_inputs(*args, **options)  # type: ignore[misc]
        finally:
            self.counting = True

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        given, images = dict(inputs.hf_processor_mm_kwargs), inputs.mm_data_items.get("image", ())
        videos = inputs.mm_data_items.get("video", ())
        sized = hasattr(images, "get_image_size")  # embeddings have no size, and stay as they are
        keep = _budget.get()
        if "keep" in given:
            keep = given.pop("keep")
            self.info.check_keep(keep)
        if self.info.settings.positions == "original":
            self.info.check_extent(images if sized else (), videos, given)
        with using(_budget, keep):
            result = super().apply(replace(inputs, hf_processor_mm_kwargs=given), timing_ctx)  # type: ignore[misc]
        if self.counting and (len(images) or len(videos)):
            budget = self.info.settings.method.keep if keep is None else keep
            shown = str(budget) if isinstance(budget, int) else f"{budget:.2f}"
            counter("requests", "Requests with images or videos, by budget.", "keep").labels(shown).inc()
        for i, placeholder in enumerate(result["mm_placeholders"].get("image", ()) if self.counting else ()):
            if images.get(i) is None:  # the client sent the key of an image that it sent before
                continue
            if not sized:
                count_tokens(placeholder.length, placeholder.length)
                continue
            size = images.get_image_size(i)
            given = {"image_width": size.width, "image_height": size.height}
            with using(_budget, keep):
                count_tokens(self.info.count_unpruned(**given), self.info.get_num_image_tokens(**given))
        if self.counting and len(videos):
            self.count_videos(result, plugin.with_keep(self.info.settings.method, keep))
        return result

    @cached_property
    def video_tokens(self) -> dict[str, int]:
        """Tokens of videos that were processed, by their keys in vLLM's caches."""
        return {}

    def count_videos(self, result: Any, method: Pruner) -> None:
        for key, item in zip(result["mm_hashes"]["video"], result["mm_kwargs"]["video"], strict=True):
            if item is not None:  # else it is cached, and only its key is known
                side = self.info.get_hf_config().vision_config.spatial_merge_size
                self.video_tokens[key] = int(item["video_grid_thw"].data.prod()) // side**2
            if (total := self.video_tokens.get(key)) is not None:
                count_tokens(total, method.count(total))
        while len(self.video_tokens) > MOST_VIDEOS:
            self.video_tokens.pop(next(iter(self.video_tokens)))

    def _get_mm_hashes(self, inputs: Any) -> Any:
        """Return the keys of vLLM's caches of processed and encoded images, in which another budget is another key."""
        keep = self.info.method.keep
        if keep != self.info.settings.method.keep:
            inputs = replace(inputs, hf_processor_mm_kwargs={**inputs.hf_processor_mm_kwargs, "keep": keep})
        return super()._get_mm_hashes(inputs)  # type: ignore[misc]

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Any) -> Any:
        processed = super()._apply_hf_processor_main(mm_items, hf_kwargs)  # type: ignore[misc]
        images = mm_items.get("image", ())
        if len(images) and hasattr(images, "get_image_size"):
            processed[KEEP["image"]] = self._budgets(len(images))
        if (grids := processed.get("video_grid_thw")) is not None:
            processed[KEEP["video"]] = self._budgets(len(grids))
        return processed

    def _budgets(self, count: int) -> Tensor:
        return torch.tensor([write_keep(self.info.method.keep)] * count, dtype=torch.float64)

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> dict[str, Any]:
        from vllm.multimodal.inputs import MultiModalFieldConfig

        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)  # type: ignore[misc]
        own = {name: MultiModalFieldConfig.batched(kind, keep_on_cpu=True) for kind, name in KEEP.items()}
        return {**fields, **own}


def write_keep(keep: int | float) -> float:
    """Return a budget as one number: a fraction below zero, or a count."""
    return float(keep) if isinstance(keep, int) else -keep


def read_keep(number: float) -> int | float:
    """Return the budget that `write_keep` wrote."""
    return -number if number < 0 else int(number)


def register_processor(info: type, processor: type, module: Any, family: str, shared: str = "") -> Any:
    """Register a model with mixins before the info and the processor that a module of vLLM has for a family; the
    latter may be that of another one, which it is `shared` with."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    info = type(f"Pruned{family}Info", (info, getattr(module, f"{family}ProcessingInfo")), {})
    processor = type(
        f"Pruned{family}Processor", (processor, getattr(module, f"{shared or family}MultiModalProcessor")), {}
    )
    dummy_inputs = getattr(module, f"{shared or family}DummyInputsBuilder")
    return MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummy_inputs)


class PrunedModel(nn.Module):
    """Mixin for a model of vLLM that keeps k tokens of each image, if asked at the positions they had.

    vLLM's M-RoPE then counts positions; a kept token carries its offset in channels behind its features.
    """

    supports_mrope = True
    supports_tower_connector_lora = False
    has_mrope = True  # false for a language model whose positions have one row
    config: Any
    language_model: Any
    offsets: Tensor
    scoring_attention: Callable[[], Any]  # returns the module, called with query and key, that scores the tokens
    extent: Callable[[Any], int]  # returns how many positions an image of a prompt spans

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        settings = plugin.read_settings(config)
        self.check_options(vllm_config, settings.positions == "original")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.method, self.original = settings.method, settings.positions == "original"
        self.timer, self.budgets = StageTimer(torch.device("cpu")), list[float]()
        self.most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.recorded: list[tuple[Tensor, Tensor]] = []
        if (attention := self.scoring_attention()) is not None:
            attention.register_forward_pre_hook(self._record, with_kwargs=True)
        if self.original:
            widen_rotary_table(
                getattr(self, "language_model", self), ANGLES * config.get_text_config().max_position_embeddings
            )
            self.register_buffer("offsets", torch.zeros(3, self.most_tokens, dtype=torch.long), persistent=False)

    @classmethod
    def refused_options(cls, vllm_config: Any, original: bool) -> dict[str, bool]:
        """Return whether options of vLLM are given that bypass the pruning, or lose original positions."""
        parallel = vllm_config.parallel_config
        return {
            "pipeline_parallel_size": original and parallel.pipeline_parallel_size > 1,
            "speculative_config": original and vllm_config.speculative_config is not None,
            "enable_dbo": original and parallel.enable_dbo,
        }

    @classmethod
    def check_options(cls, vllm_config: Any, original: bool = True) -> None:
        given = " and ".join(name for name, is_given in cls.refused_options(vllm_config, original).items() if is_given)
        where = " at original positions" if original else ""
        if given:
            raise ValueError(f"{given} can't be combined with pruning{where}: leave out what is named")

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode and prune the images of a step, each with the budget of its request."""
        self.start_step(kwargs.pop(KEEP["image"], None))
        embeddings = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        count_seconds(self.timer)
        return embeddings

    def start_step(self, budgets: Tensor | None) -> None:
        self.budgets = [] if budgets is None else budgets.flatten().tolist()
        self.timer = StageTimer(next(self.parameters()).device)

    def prune_images(self, images: Sequence[VisualTokens]) -> list[PrunedImage]:
        """Select from the images of a step, those of one budget and size together. Values are not checked: an error
        would end the server."""
        results: dict[int, PrunedImage] = {}
        with self.timer.time("selection"):
            for number in dict.fromkeys(self.budgets):
                some = [i for i, one in enumerate(self.budgets) if one == number]
                method = plugin.with_keep(self.method, read_keep(number))
                pruned, _ = prune_images(method, [images[i] for i in some], "image", "raw", check=False)
                results.update(zip(some, pruned, strict=True))
        return [results[i] for i in range(len(images))]

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...], arguments: dict[str, Any]) -> None:
        query, key = (inputs or tuple(arguments[name] for name in ("query", "key")))[:2]
        self.recorded.append((query, key))

    def run_tower(self, tower: Callable[..., Tensor], *inputs: Any, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.recorded.clear()
        output = tower(*inputs, **arguments)
        if len(self.recorded) != 1:
            raise RuntimeError(f"the vision tower ran {len(self.recorded)} times, expected once")
        return output, *self.recorded.pop()

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        return starting_positions(len(input_tokens), map(self.place_of, mm_features))

    def place_of(self, feature: Any) -> tuple[int, int, int]:
        """Return the first placeholder of an image, how many it has left, and how many positions it spans."""
        return feature.mm_position.offset, feature.mm_position.length, self.extent(feature)

    def placed(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Tokens [..., k, D], with the slots [..., k] they had in channels behind them if positions are original."""
        if not self.original:
            return tokens
        return torch.cat([tokens, offset_channels(slots.expand(3, *slots.shape), tokens.dtype)], -1)

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        """Embed a step's tokens, and note what its visual tokens add to their positions for `forward`."""
        if self.original:
            self.offsets.zero_()
            if multimodal_embeddings is not None and len(multimodal_embeddings):
                multimodal_embeddings, offsets = split_channels(multimodal_embeddings)
                self.offsets[:, : len(input_ids)][:, is_multimodal] = offsets
        embed = super().embed_input_ids  # type: ignore[misc]
        embeddings: Tensor = embed(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)
        return embeddings

    def forward(self, input_ids: Tensor | None, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids, self.original_positions(positions), *args, **kwargs)

    def original_positions(self, positions: Tensor) -> Tensor:
        """Add what `embed_input_ids` noted. Positions change in place: captured graphs read them where they lie."""
        if not self.original:
            return positions
        offsets = self.offsets[:, : positions.shape[-1]]
        positions[:, : offsets.shape[1]] += offsets
        offsets.zero_()
        return positions if self.has_mrope else positions[0]


def widen_rotary_table(model: nn.Module, rows: int) -> None:
    """Give the tables of angles at least some rows: positions outrun the length of a pruned prompt."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    for rope in model.modules():
        if isinstance(rope, RotaryEmbeddingBase) and len(rope.cos_sin_cache) < rows:
            before, rope.max_position_embeddings = rope.cos_sin_cache, rows
            table = rope._compute_cos_sin_cache().to(before)
            if not torch.equal(table[: len(before)], before):
                kind = type(rope).__name__
                raise ValueError(f"positions must be 'compact' for {kind}, whose angles depend on the longest prompt")
            rope.register_buffer("cos_sin_cache", table, persistent=False)
            if getattr(rope, "cos_sin_cache_bf16", None) is not None:
                rope.cos_sin_cache_bf16 = table.to(torch.bfloat16)


def mean_over_ranks(mean: Tensor, ranks: int) -> Tensor:
    """Average over the heads of all ranks; every rank has equally many."""
    if ranks == 1:
        return mean
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(mean) / ranks


def find_run(ids: Sequence[int], token: int) -> tuple[int, int]:
    """Return the indices of the first and the last placeholder."""
    return ids.index(token), len(ids) - 1 - list(reversed(ids)).index(token)


def cut_run(ids: Sequence[int], token: int, keep: int) -> Any:
    """Return a prompt's update with k placeholders; and where text stands between some, one for each of its tokens."""
    from vllm.multimodal.processing import PromptUpdateDetails

    first, last = find_run(ids, token)
    run = [token] * (keep + last + 1 - first - ids.count(token))
    return PromptUpdateDetails.select_token_id([*ids[:first], *run, *ids[last + 1 :]], token)


def prompt_order(is_slot: Tensor, kept: PrunedImage) -> tuple[Tensor, Tensor]:
    """Order the kept tokens of an image and the text between its placeholders, in this order, as in the prompt: return
    their indices and where each came from in the unpruned run [R] of both."""
    slots, text = is_slot.nonzero()[:, 0], (~is_slot).nonzero()[:, 0]
    order = torch.cat([slots[kept.slots], text]).argsort()
    return order, torch.cat([slots[kept.own], text])[order]


def starting_positions(length: int, images: Iterable[tuple[int, int, int]]) -> tuple[Tensor, int]:
    """Positions [3, length] with every placeholder at the start of its image; and what to add to the length of the
    sequence for the position of the next token. An image is its first placeholder, how many it has left, and how many
    positions it spans."""
    steps = torch.ones(length, dtype=torch.long)
    for start, kept, extent in images:
        steps[start : start + kept] = 0
        steps[start + kept - 1] = extent
    after = steps.cumsum(0)
    return (after - steps).repeat(3, 1), int(steps.sum()) - length


def offset_channels(offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Offsets [3, ..., k] as digits [..., k, CHANNELS] of a floating-point type."""
    rows = offsets.movedim(0, -1)
    return torch.stack([rows // BASE**i % BASE for i in range(DIGITS)], -1).flatten(-2).to(dtype)


def split_channels(embeddings: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The features of images without the channels behind them, and the offsets [3, k of all images] these hold."""
    digits = torch.cat([rows[:, -CHANNELS:] for rows in embeddings]).long().unflatten(-1, (3, DIGITS))
    offsets = sum(digits[..., i] * BASE**i for i in range(DIGITS))
    return [rows[:, :-CHANNELS] for rows in embeddings], offsets.T
