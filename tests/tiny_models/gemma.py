"""Tiny models of Gemma 3, PaliGemma and PaliGemma 2, and pruning done on them by hand, without our adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from packaging.version import Version
from PIL import Image
from torch import Tensor

import tiny_models
from clustrs import Pruner, Selection
from tiny_models import asked, byte_tokenizer

KINDS: tuple[str, ...] = ("gemma3", "paligemma", "paligemma2")
QUESTION = "what is it?"
GRID = 4
CELLS = GRID * GRID
"""Tokens a crop."""
PATCH = 7
WINDOW = 12
"""The sliding layers of Gemma 2 and 3 see this many columns: fewer than a prompt has."""
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
EXTRA = {
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "paligemma": {"image_token": "<image>"},
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{{ '<start_of_image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}model:{% endif %}"
)


def tokenizer(kind: str) -> Any:
    """Bytes as tokens."""
    extra = EXTRA[kind]
    return byte_tokenizer([*SPECIAL.values(), *extra.values()], extra, **SPECIAL)


def tower_config(side: int) -> Any:
    return tf.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=side,
        patch_size=PATCH,
        vision_use_head=False,
    )


def text_shape(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def build_gemma3() -> tuple[Any, Any]:
    words = tokenizer("gemma3")
    images = tf.Gemma3ImageProcessorPil(
        size={"height": 2 * GRID * PATCH, "width": 2 * GRID * PATCH},
        do_pan_and_scan=False,
        pan_and_scan_min_crop_size=20,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    processor = tf.Gemma3Processor(images, words, chat_template=TEMPLATE, image_seq_length=CELLS)
    layers = ["sliding_attention", "full_attention"]
    text = tf.Gemma3TextConfig(
        **text_shape(len(words)), query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=layers
    )
    config = tf.Gemma3Config(
        text_config=text,
        vision_config=tower_config(2 * GRID * PATCH),
        mm_tokens_per_image=CELLS,
        image_token_index=words.image_token_id,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
    )
    return tf.Gemma3ForConditionalGeneration(config), processor


def build_paligemma(second: bool) -> tuple[Any, Any]:
    words = tokenizer("paligemma")
    images = tf.SiglipImageProcessorPil(size={"height": GRID * PATCH, "width": GRID * PATCH})
    images.image_seq_length = CELLS
    processor = tf.PaliGemmaProcessor(images, words)
    shape = text_shape(len(words))
    if second:
        layers = ["sliding_attention", "full_attention"]
        text = tf.Gemma2Config(**shape, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=layers)
    else:
        text = tf.GemmaConfig(**shape)
    config = tf.PaliGemmaConfig(
        text_config=text,
        vision_config=tower_config(GRID * PATCH),
        image_token_index=words.image_token_id,
        projection_dim=32,
        hidden_size=32,
    )
    return tf.PaliGemmaForConditionalGeneration(config), processor


def build(kind: str, folder: Path) -> None:
    """Save a model and its processor. The weights are large, so that outputs depend on the images; but not those of the
    words, which the head shares: a word would be followed by itself, whatever the image is."""
    torch.manual_seed(0)
    model, processor = build_gemma3() if kind == "gemma3" else build_paligemma(kind == "paligemma2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02 if "embed_tokens" in name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@cache
def saved(kind: str) -> TemporaryDirectory[str]:
    """The folder of a saved model, built once and gone at the end."""
    folder = TemporaryDirectory(prefix=f"{kind}-")
    build(kind, Path(folder.name))
    return folder


def load(kind: str) -> tuple[Any, Any]:
    """A model and its processor, as if freshly loaded."""
    return tiny_models.load(Path(saved(kind).name))


def question(kind: str, text: str = QUESTION) -> str:
    """A prompt about one image; PaliGemma's come first."""
    return f"<bos>user: <image>{text}" if kind == "gemma3" else f"<image>{text}"


def prompt(processor: Any, text: str, images: Sequence[Image.Image] = (), **options: Any) -> dict[str, Any]:
    """Inputs for one prompt, in which `<image>` stands for an image."""
    words = text.replace("<image>", processor.image_token)
    if images:
        inputs = dict(processor(images=[list(images)], text=[words], return_tensors="pt", **options))
        inputs.pop("labels", None)
        return inputs
    inputs = dict(processor.tokenizer([words], return_tensors="pt"))
    return {**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])}


def batch(rows: Sequence[dict[str, Any]], left: bool = True) -> dict[str, Any]:
    """Prompts padded to one length."""
    width = max(row["input_ids"].shape[1] for row in rows)
    out = {}
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        missing = [width - row[name].shape[1] for row in rows]
        sides = [(n, 0) if left else (0, n) for n in missing]
        padded = [torch.nn.functional.pad(row[name], side) for row, side in zip(rows, sides, strict=True)]
        out[name] = torch.cat(padded)
    pixels = [row["pixel_values"] for row in rows if "pixel_values" in row]
    return {**out, "pixel_values": torch.cat(pixels)} if pixels else out


@dataclass(frozen=True)
class Maps:
    """What the tower says of some crops, as lists of tokens."""

    tokens: Tensor
    scores: Tensor
    hidden: Tensor
    keys: Tensor
    middle: Tensor
    joint_keys: Tensor


class Oracle:
    """Pruning of one prompt without padding: scores of eager attention, ids, masks and positions by hand."""

    def __init__(self, model: Any) -> None:
        self.model, self.inner = model, model.model
        self.gemma3 = model.config.model_type == "gemma3"

    @torch.no_grad()
    def maps(self, pixels: Tensor) -> Maps:
        """Features, scores, hidden states and keys [crops, 16, ...] of some crops."""
        tower, keys = self.inner.vision_tower, []
        last = getattr(tower, "vision_model", tower).encoder.layers[-1].self_attn
        hook = last.k_proj.register_forward_hook(lambda module, args, out: keys.append(out))
        before = tower.config._attn_implementation
        tower.set_attn_implementation("eager")
        try:
            out = tower(pixels, output_attentions=True)
        finally:
            tower.set_attn_implementation(before)
            hook.remove()
        scores = out.attentions[-1].mean((1, 2))[..., None]
        middle = out.attentions[0].mean((1, 2))[..., None]  # the first of two layers is early, and that of objects
        parts = [scores, out.last_hidden_state, keys[0].unflatten(-1, (4, -1)).mean(2), middle, keys[0]]
        if self.gemma3:
            parts = [by_twos(part) for part in parts]
        return Maps(self.projected(parts[1]), parts[0][..., 0], parts[1], parts[2], parts[3][..., 0], parts[4])

    def projected(self, hidden: Tensor) -> Tensor:
        projector = self.inner.multi_modal_projector
        if not self.gemma3:
            return hidden @ projector.linear.weight.T + projector.linear.bias
        norm = projector.mm_soft_emb_norm
        normed = hidden * (hidden.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * (1 + norm.weight)
        return normed @ projector.mm_input_projection_weight

    def select(self, method: Pruner, pixels: Tensor) -> Selection:
        """What a method keeps of one image, all crops together."""
        maps = self.maps(pixels)
        states: dict[str, Any] = {name: getattr(maps, name).flatten(0, 1) for name in ("hidden", "keys", "joint_keys")}
        states |= {name: maps.scores.flatten() for name in ("received", "joint_scores")}
        states |= {name: maps.middle.flatten() for name in ("object_scores", "early_scores")}
        states["question"] = asked(self.model, QUESTION)
        with torch.no_grad():
            return method.select(
                maps.tokens.flatten(0, 1), maps.scores.flatten(), projector=self.projected, cls=False, **states
            )

    def columns(self, ids: Tensor, kept: Sequence[Sequence[int]], slots: int = CELLS) -> list[int]:
        """The columns of a prompt [S] that stay: text, and the kept ones of each image's `slots` placeholders."""
        stay, seen = [], 0
        for column, token in enumerate(ids.tolist()):
            if token == self.model.config.image_token_id:
                image, slot = divmod(seen, slots)
                seen += 1
                if slot not in kept[image]:
                    continue
            stay.append(column)
        return stay

    @torch.no_grad()
    def logits(self, ids: Tensor, types: Tensor, rows: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """Logits [S, V] of a prompt [S] whose placeholders stand for `rows`."""
        embeds = self.inner.language_model.embed_tokens(ids)
        if rows is not None:
            embeds[ids == self.model.config.image_token_id] = rows
        first = 0 if self.gemma3 else 1
        if positions is None:
            positions = torch.arange(first, first + len(ids))
        out = self.inner.language_model(
            inputs_embeds=embeds[None], attention_mask=self.masks(types), position_ids=positions[None]
        )
        return self.head(out.last_hidden_state)[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states. From transformers 5.23 on, PaliGemma 2's are capped as its language model asks."""
        logits: Tensor = self.model.lm_head(hidden)
        cap = getattr(self.model.config.text_config, "final_logit_softcapping", None)
        if cap is None or Version(tf.__version__) < Version("5.23"):
            return logits
        return cap * (logits / cap).tanh()

    def masks(self, types: Tensor) -> Any:
        """Who sees whom: [1, 1, S, S], for each kind of layer where there are two."""
        n = len(types)
        query, key = torch.arange(n)[:, None], torch.arange(n)[None]
        full, near = key <= query, key > query - WINDOW
        if self.gemma3:
            run = 0
            block = torch.full((n,), -1)
            for i, kind in enumerate(types.tolist()):
                if kind == 1:
                    run += i == 0 or int(types[i - 1]) != 1
                    block[i] = run
            together = (block[:, None] == block[None]) & (block[:, None] >= 0)
            sliding = (full | together) & near
        else:
            together = (types[:, None] == 0) & (types[None] == 0)
            sliding = (full & near) | together
        hidden = torch.finfo(torch.float32).min
        whole, part = (torch.zeros(1, 1, n, n).masked_fill(~seen, hidden) for seen in (full | together, sliding))
        one_kind = self.inner.language_model.config.model_type == "gemma"
        return whole if one_kind else {"full_attention": whole, "sliding_attention": part}

    def greedy(self, ids: Tensor, types: Tensor, rows: Tensor | None, positions: Tensor, count: int) -> list[int]:
        """New tokens, the whole prompt computed anew for each."""
        start = len(ids)
        after = int(positions[-1]) + 1
        for _ in range(count):
            token = self.logits(ids, types, rows, positions)[-1].argmax()
            ids, types = torch.cat([ids, token[None]]), torch.cat([types, types.new_tensor([int(not self.gemma3)])])
            positions = torch.cat([positions, torch.tensor([after])])
            after += 1
        return ids[start:].tolist()


def by_twos(patches: Tensor) -> Tensor:
    """A map [crops, 64, F], averaged over squares of 2 x 2 patches."""
    out = torch.zeros(len(patches), CELLS, patches.shape[-1])
    for y in range(GRID):
        for x in range(GRID):
            square = [(2 * y + dy) * 2 * GRID + 2 * x + dx for dy in (0, 1) for dx in (0, 1)]
            out[:, y * GRID + x] = patches[:, square].mean(1)
    return out
