"""Small random models of the families that cut an image into tiles, and pruning done by hand on them.

Nothing here uses the library's adapters: scores come from eager attention, tokens from a loop over squares of patches.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from PIL import Image
from torch import Tensor

from clustrs import Pruner, PrunerInputs, Selection
from clustrs.models.processors import InternVLProcessor, SmolVLMProcessor
from clustrs.pruners.inputs import Layout
from tiny_models import asked, byte_tokenizer, load

FAMILIES: tuple[str, ...] = ("internvl", "smolvlm", "idefics3")
GRID = 4
"""Tokens side by side in a tile: 8 x 8 patches, four to a token."""
TOKENS = GRID * GRID
IMAGE_TOKENS = {"internvl": "<IMG_CONTEXT>", "smolvlm": "<image>", "idefics3": "<image>"}
SPECIAL = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "smolvlm": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
        "video_token": "<video>",
    },
}
SPECIAL["idefics3"] = SPECIAL["smolvlm"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{{ 'IMAGE' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer(family: str) -> Any:
    """Bytes as tokens, and the tokens that the family puts around its crops."""
    extra = SPECIAL[family]
    special = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        *extra.values(),
        *(f"<row_{y}_col_{x}>" for y in (1, 2) for x in (1, 2)),
    ]
    words = byte_tokenizer(special, extra)
    words.backend_tokenizer.add_special_tokens(special)
    return words


def build(family: str, folder: Path, heads: int = 4, videos: bool = False, **settings: Any) -> None:
    """Save a model and its processor. Weights are large, so that outputs depend on the images. `heads` of the language
    model, 1 for vLLM; `videos`: with the processor's part for videos, which needs torchvision."""
    words = tokenizer(family)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text_class = tf.Qwen2Config if family == "internvl" else tf.LlamaConfig
    text = text_class(
        **sizes | {"num_attention_heads": heads},
        num_hidden_layers=2,
        vocab_size=len(words),
        num_key_value_heads=(heads + 1) // 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    template = {"tokenizer": words, "chat_template": TEMPLATE.replace("IMAGE", IMAGE_TOKENS[family])}
    if family == "internvl":
        vision = tf.InternVLVisionConfig(**sizes, num_hidden_layers=3, image_size=[56, 56], patch_size=[7, 7])
        config = tf.InternVLConfig(
            vision_config=vision, text_config=text, image_token_id=words.context_image_token_id, **settings
        )
        model = tf.InternVLForConditionalGeneration(config)
        images = tf.GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=4)
        made = tf.InternVLProcessor if videos else InternVLProcessor
        template |= {"video_processor": tf.InternVLVideoProcessor()} if videos else {}
        processor: Any = made(image_processor=images, image_seq_length=TOKENS, **template)
    else:
        configs = {
            "smolvlm": (tf.SmolVLMConfig, tf.models.smolvlm.configuration_smolvlm.SmolVLMVisionConfig),
            "idefics3": (tf.Idefics3Config, tf.models.idefics3.configuration_idefics3.Idefics3VisionConfig),
        }
        whole, tower = configs[family]
        vision = tower(**sizes, num_hidden_layers=3, image_size=32, patch_size=4)
        config = whole(
            vision_config=vision,
            text_config=text,
            image_token_id=words.image_token_id,
            pad_token_id=0,
            scale_factor=2,
            **settings,
        )
        kind = tf.SmolVLMForConditionalGeneration if family == "smolvlm" else tf.Idefics3ForConditionalGeneration
        model = kind(config)
        pil = tf.SmolVLMImageProcessorPil if family == "smolvlm" else tf.Idefics3ImageProcessorPil
        images = pil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
        made = SmolVLMProcessor if family == "smolvlm" else tf.Idefics3Processor
        if videos and family == "smolvlm":
            made = tf.SmolVLMProcessor
            template["video_processor"] = tf.SmolVLMVideoProcessor()
        processor = made(image_processor=images, image_seq_len=TOKENS, **template)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lambda" in name:
                parameter.fill_(1)
            elif not bool(parameter.any()):
                parameter.normal_(std=0.5)
            elif parameter.dim() > 1:
                parameter.mul_(16)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    """A loaded model, its processor, and the family they belong to."""

    family: str
    model: Any
    processor: Any

    @property
    def image_id(self) -> int:
        return int(self.model.config.image_token_id)

    @property
    def tower(self) -> Any:
        inner = self.model.model
        return inner.vision_tower if self.family == "internvl" else inner.vision_model

    def prepare(self, texts: list[str], images: list[list[Image.Image]], **options: Any) -> dict[str, Any]:
        """Inputs for a batch of prompts, each with its own images; IMAGE stands for one."""
        texts = ["<s>" + text.replace("IMAGE", self.processor.image_token) for text in texts]
        given: list[Any] = [image for row in images for image in row]
        if self.family == "smolvlm":
            given = images if given else []
        return dict(self.processor(images=given or None, text=texts, padding=True, return_tensors="pt", **options))

    def tiles(self, inputs: dict[str, Any]) -> Tensor:
        """The pixels [C, 3, H, W] of the tiles of the only prompt."""
        pixels: Tensor = inputs["pixel_values"]
        return pixels if self.family == "internvl" else pixels[0]

    def counts(self, images: list[Image.Image]) -> list[int]:
        """How many tiles the image processor makes of each image."""
        if self.family == "internvl":
            made = self.processor.image_processor(images, crop_to_patches=True)
            return [int(n) for n in made["num_patches"]]
        made = self.processor.image_processor([images], return_row_col_info=True)
        return [
            rows * columns + 1 if rows else 1 for rows, columns in zip(made["rows"][0], made["cols"][0], strict=True)
        ]


def load_case(family: str, folder: Path, **options: Any) -> Case:
    return Case(family, *load(folder, **options))


def merge(patches: Tensor) -> Tensor:
    """[64, F] of a tile's patches as [16, 4 F] of its tokens, cell by cell."""
    rows = patches.unflatten(0, (2 * GRID, 2 * GRID))
    cells = [
        torch.cat([rows[2 * y, 2 * x], rows[2 * y, 2 * x + 1], rows[2 * y + 1, 2 * x], rows[2 * y + 1, 2 * x + 1]])
        for y in range(GRID)
        for x in range(GRID)
    ]
    return torch.stack(cells)


@dataclass(frozen=True)
class ByHand:
    """All tiles of a prompt: tokens, scores, hidden states and keys [C * 16, ...], the CLS tokens [C, ...]."""

    tokens: Tensor
    scores: Tensor
    hidden: Tensor
    keys: Tensor
    cls_hidden: Tensor
    cls_keys: Tensor
    more: dict[str, Tensor]


@torch.no_grad()
def by_hand(case: Case, pixels: Tensor) -> ByHand:
    """What eager attention and the projector say of some tiles."""
    inner, tower, cls = case.model.model, case.tower, case.family == "internvl"
    blocks = tower.encoder.layer if cls else tower.encoder.layers
    attention = blocks[-1].attention if cls else blocks[-1].self_attn
    found: dict[Any, Tensor] = {}
    hooks = [
        part.register_forward_hook(lambda module, args, out: found.update({module: out}))
        for part in (attention.k_proj, attention.q_proj)
    ]
    before = tower.config._attn_implementation
    tower.set_attn_implementation("eager")
    try:
        out = tower(pixels, output_attentions=True)
    finally:
        tower.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    key, query, weights, first = found[attention.k_proj], found[attention.q_proj], out.attentions[-1], int(cls)
    patch_scores = weights[:, :, 0, 1:].mean(1) if cls else weights.mean((1, 2))
    keys, hidden = key.unflatten(-1, (4, -1)).mean(2), out.last_hidden_state
    merged = torch.cat([merge(tile) for tile in hidden[:, first:]])
    scores = {"received": weights.mean((1, 2))[:, first:], "object_scores": out.attentions[0].mean((1, 2))[:, first:]}
    scores["early_scores"], scores["joint_scores"] = scores["object_scores"], scores["received"]
    if cls:  # the first of three layers is early, and that of objects
        scores["early_scores"] = out.attentions[0][:, :, 0, 1:].mean(1)
        scores["joint_scores"] = (query[:, :1] @ key.mT / query.shape[-1] ** 0.5).softmax(-1)[:, 0, 1:]
    project = inner.multi_modal_projector if cls else inner.connector.modality_projection
    return ByHand(
        project(merged),
        torch.cat([merge(tile[:, None]) for tile in patch_scores]).mean(1),
        merged,
        torch.cat([merge(tile) for tile in keys[:, first:]]),
        torch.cat([hidden[:, 0]] * 4, -1),
        torch.cat([keys[:, 0]] * 4, -1),
        {
            **{name: torch.cat([merge(tile[:, None]) for tile in part]).mean(1) for name, part in scores.items()},
            "joint_keys": torch.cat([merge(tile) for tile in key[:, first:]]),
        },
    )


def layout(tiles: int) -> Layout:
    """The last tile is the whole image, and has number 0."""
    places = [((t + 1) % tiles, y, x) for t in range(tiles) for y in range(GRID) for x in range(GRID)]
    return Layout(*torch.tensor(places).T)


def select(case: Case, method: Pruner, states: ByHand, tiles: range, question: Tensor | None) -> Selection:
    """What a method keeps of an image that has some of the tiles."""
    rows = slice(tiles.start * TOKENS, tiles.stop * TOKENS)
    hidden, keys, cls = states.hidden[rows], states.keys[rows], case.family == "internvl"
    if cls:
        hidden = torch.cat([states.cls_hidden[tiles.stop - 1 : tiles.stop], hidden])
        keys = torch.cat([states.cls_keys[tiles.stop - 1 : tiles.stop], keys])
    inner = case.model.model
    project = inner.multi_modal_projector if cls else inner.connector.modality_projection
    more = {name: part[rows] for name, part in states.more.items()}
    places = layout(len(tiles))
    given = PrunerInputs(states.tokens[rows], states.scores[rows], places, hidden, keys, project, cls, **more)
    return method.select(replace(given, question=question))


@torch.no_grad()
def oracle(
    case: Case, method: Pruner, inputs: dict[str, Any], counts: list[int], base: bool = False, question: str = ""
) -> tuple[Tensor, Tensor, list[Selection]]:
    """The embeddings [1, S, D] of the only prompt with its images pruned by hand, the columns that they had, and what
    was kept of each image."""
    ids = inputs["input_ids"][0]
    states = by_hand(case, case.tiles(inputs))
    table, words = case.model.get_input_embeddings(), asked(case.model, question) if question else None
    columns = (ids == case.image_id).nonzero()[:, 0].tolist()
    rows: dict[int, Tensor] = {}
    selections, start = [], 0
    for count in counts:
        first = start + count - 1 if base else start
        selection = select(case, method, states, range(first, start + count), words)
        selections.append(selection)
        kept = list(zip(selection.indices.tolist(), selection.tokens, strict=True))
        slots = [columns[first * TOKENS + i] for i, _ in kept if i >= 0]
        free = [c for c in columns[first * TOKENS : (start + count) * TOKENS] if c not in slots]
        slots = sorted(slots + free[: len(kept) - len(slots)])
        if case.family != "internvl":  # every token stays with the text of its crop
            kept.sort(key=lambda pair: pair[0] // TOKENS)
        rows |= {slot: token for slot, (_, token) in zip(slots, kept, strict=True)}
        start += count
    left = [c for c in range(len(ids)) if c in rows or int(ids[c]) != case.image_id]
    embeddings = torch.stack([rows[c] if c in rows else table(ids[c]) for c in left])
    return embeddings[None], torch.tensor(left)[None], selections
