"""Pruning inside the language model by hand: every layer at full length, with its own attention and explicit masks.

A token that is dropped before a layer is masked as a key there and in all layers after it. Nothing is ever cached: for
each new token the whole prompt runs again. Embeddings, position embeddings and deepstack features are those that the
untouched model computes for its first layer.
"""

from typing import Any

import numpy as np
import torch
from reference import inside as reference
from torch import Tensor

from clustrs import DART, FastV, Pruner, PyramidDrop


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = x[..., :width] * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned, x[..., width:]], -1)


class Oracle:
    """A model without a method, its inputs (padded left), and a method inside the language model to follow.

    With a method `first`, of one image per prompt, the language model reads what that one keeps.
    """

    def __init__(
        self,
        model: Any,
        inputs: dict[str, Any],
        method: Any,
        images: list[list[int]] | None = None,
        first: Pruner | None = None,
        attention: Any = "plain",
    ) -> None:
        self.model, self.inputs, self.method, self.first, self.attention = model, inputs, method, first, attention
        self.decoder = model.get_decoder()
        self.layers = list(self.decoder.layers)
        ids, token = inputs["input_ids"], model.config.image_token_id
        if first is not None:
            rows = []
            for row in ids.tolist():
                start, n = row.index(token), row.count(token)
                rows.append(row[:start] + [token] * first.count(n) + row[start + n :])
            ids = torch.tensor(rows)
        self.dropped, self.prompt = inputs["input_ids"].shape[1] - ids.shape[1], ids.shape[1]
        self.is_image = ids == token
        self.images = images or [[int(count)] for count in self.is_image.sum(1)]
        """Tokens of each image of each prompt."""
        self.prefix = model.config.model_type == "paligemma"
        self.kept: dict[int, list[list[int]]] = {}
        """What is left of each prompt from a layer on, as columns."""

    def first_layer(self, ids: Tensor) -> dict[str, Any]:
        """What the untouched model feeds to its first layer, for a longer prompt."""
        found: dict[str, Any] = {}
        more = ids.shape[1] - self.inputs["input_ids"].shape[1]
        given = {**self.inputs, "input_ids": ids, "labels": None}
        for name, value in (("attention_mask", 1), ("token_type_ids", 0), ("mm_token_type_ids", 0)):
            if given.get(name) is not None:
                given[name] = torch.nn.functional.pad(given[name], (0, more), value=value)
        if not self.model.config.model_type.startswith("qwen"):
            counted = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
            given["position_ids"] = counted + 1 if self.prefix else counted  # PaliGemma counts from 1
            found["positions"] = given["position_ids"]

        def outer(module: Any, args: Any, kwargs: Any) -> None:
            for name in ("visual_pos_masks", "deepstack_visual_embeds"):
                found[name] = kwargs.get(name)

        def layer(module: Any, args: Any, kwargs: Any) -> None:
            found["hidden"], found["embeddings"] = args[0], kwargs["position_embeddings"]

        hooks = [
            self.decoder.register_forward_pre_hook(outer, with_kwargs=True),
            self.layers[0].register_forward_pre_hook(layer, with_kwargs=True),
        ]
        if self.first is None:
            self.model(**given)
        else:
            with self.first(self.model, positions="original", attention=self.attention) as handle:
                self.model(**given)
            if self.attention == "proportional":
                found["sizes"] = [image.selection.sizes for image in handle.last]
        for hook in hooks:
            hook.remove()
        valid = given["attention_mask"] != 0
        found["valid"] = valid[:, : valid.shape[1] - self.dropped]  # padding is on the left
        return found

    def project(self, layer: Any, hidden: Tensor, embeddings: Any) -> tuple[Tensor, Tensor, Tensor]:
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        parts = []
        for name in ("q", "k", "v"):
            part = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim))
            if hasattr(attention, f"{name}_norm"):
                part = getattr(attention, f"{name}_norm")(part)
            part = part.transpose(1, 2)
            parts.append(part if name == "v" else rotate(part, *(one.expand(len(x), -1, -1) for one in embeddings)))
        query, key, value = parts
        groups = query.shape[1] // key.shape[1]
        return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V] of prompt and new tokens; the first call, with the prompt alone, chooses."""
        found = self.first_layer(ids)
        hidden, embeddings, valid = found["hidden"], found["embeddings"], found["valid"]
        batch, length = hidden.shape[:2]
        column = torch.arange(length)
        causal = column[None] <= column[:, None]
        if self.prefix:
            causal = causal | ((column < self.prompt)[None] & (column < self.prompt)[:, None])
        held, self.bias = valid.clone(), torch.zeros(valid.shape)
        for row, sizes in enumerate(found.get("sizes", [])):
            self.bias[row, : self.prompt][self.is_image[row]] = sizes.float().log()
        schedule = self.schedule()
        attention = keys = None
        for index, layer in enumerate(self.layers):
            query, key, value = self.project(layer, hidden, embeddings)
            weights = self.attend(layer, query, key, causal, held)
            if index in schedule:
                if length == self.prompt:
                    own = isinstance(self.method, PyramidDrop)
                    seen, states = (weights, key) if own else (attention, keys)
                    norm = self.decoder.norm(hidden).double().numpy()
                    self.kept[index] = [
                        self.choose(row, schedule[index], seen, states, norm, held) for row in range(batch)
                    ]
                for row, left in enumerate(self.kept[index]):
                    gone = set(range(self.prompt)) - set(left)
                    held[row, list(gone)] = False
                if getattr(self.method, "compact", False):
                    before = (valid & ~held).cumsum(1)
                    embeddings = self.decoder.rotary_emb(hidden, found["positions"] - before)
                query, key, value = self.project(layer, hidden, embeddings)
                weights = self.attend(layer, query, key, causal, held)
            attention, keys = weights, key
            out = (weights @ value).transpose(1, 2).flatten(2)
            hidden = hidden + layer.self_attn.o_proj(out)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            planes = found.get("deepstack_visual_embeds")
            if planes is not None and index < len(planes):
                hidden = hidden.clone()
                hidden[found["visual_pos_masks"]] += planes[index]
        return self.model.lm_head(self.decoder.norm(hidden))

    def attend(self, layer: Any, query: Tensor, key: Tensor, causal: Tensor, held: Tensor) -> Tensor:
        """Softmax attention [B, heads, S, S]; a query that sees nothing attends to itself alone."""
        allowed = (causal & held[:, None]) | torch.eye(len(causal), dtype=torch.bool)
        logits = query @ key.mT * layer.self_attn.scaling + self.bias[:, None, None]
        return logits.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)

    def schedule(self) -> dict[int, int]:
        """The layers to prune at, and which step each is."""
        if isinstance(self.method, PyramidDrop):
            return {max(1, int(len(self.layers) * share)): i for i, share in enumerate(self.method.layers)}
        return {self.method.layer: 0}

    def choose(self, row: int, step: int, attention: Any, keys: Any, norm: Any, held: Tensor) -> list[int]:
        """Columns that are left of one prompt."""
        left = [c for c in range(self.prompt) if not self.is_image[row, c]]
        every = [c for c in range(self.prompt) if self.is_image[row, c]]
        groups = self.layers[0].self_attn.num_key_value_groups
        for total in self.images[row]:
            mine, every = every[:total], every[total:]
            k = self.method.count(total)
            mine = [c for c in mine if held[row, c]]
            scores = attention[row].mean(0)[self.prompt - 1].double().numpy()
            if isinstance(self.method, FastV):
                chosen = reference.fastv(scores[mine], k)
            elif isinstance(self.method, PyramidDrop):
                count = reference.pyramiddrop_counts(total, k, len(self.method.layers))[step]
                chosen = reference.fastv(scores[mine], count)
            else:
                assert isinstance(self.method, DART)
                text = [c for c in range(mine[-1] + 1, self.prompt) if not self.is_image[row, c] and held[row, c]]
                states = keys[row, ::groups].transpose(0, 1).double().numpy()
                chosen = reference.dart(states, np.asarray(norm[row]), mine, text, k)
            left += [mine[i] for i in chosen]
        return sorted(left)
