"""Attention scores: as eager attention reports them, from the right layer, without a heads x N x N tensor."""

import threading
from typing import Any

import oracle
import pytest
import torch
from tiny_models import PATCHES, TOWERS, Load, make_image, prepare
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clustrs import ClustRS
from clustrs.models.adapters.base import attention_layer, get_adapter, has_cls, recorded
from clustrs.models.scoring import StageTimer, attention_scores, record_scores


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made inside."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(out) if isinstance(t, torch.Tensor)
        ]
        self.numel = max([self.numel, *sizes])
        return out


def clock() -> StageTimer:
    return StageTimer(torch.device("cpu"))


@pytest.mark.parametrize("feature_layer", [-1, -2, -3, 1, 3])
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("running", ["sdpa", "eager"])
def test_scores_are_those_of_eager_attention(load: Load, tower: str, feature_layer: int, running: str) -> None:
    model, _ = load("llava", tower, attn_implementation=running)
    pixels = torch.randn(3, 3, 28, 28)
    vision = model.model.vision_tower
    with torch.no_grad():
        untouched = vision(pixels, output_hidden_states=True).hidden_states
        reduction: Any = "cls" if has_cls(vision) else "received"
        with record_scores(attention_layer(vision, feature_layer), reduction, clock()) as recorder:
            hidden_states = vision(pixels, output_hidden_states=True).hidden_states
    scores, keys = recorded(recorder)
    assert all(torch.equal(a, b) for a, b in zip(untouched, hidden_states, strict=True)), "recording changes nothing"
    model.config.vision_feature_layer = feature_layer if feature_layer < 0 else feature_layer - len(hidden_states)
    expected = oracle.eager_scores(model, pixels, has_cls(vision))
    torch.testing.assert_close(scores, expected.detach(), atol=1e-6, rtol=1e-4)
    assert float((scores - expected).abs().max()) <= 1e-6
    torch.testing.assert_close(keys, oracle.keys_of(model, pixels).detach(), atol=1e-5, rtol=1e-4)
    assert scores.shape == (3, PATCHES)


@pytest.mark.parametrize("reduction", ["cls", "received"])
def test_half_precision_scores_are_float32(reduction: Any) -> None:
    query, key = torch.randn(2, 2, 4, 10, 8).bfloat16()
    scores = attention_scores(query, key, 0.5, reduction)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, attention_scores(query.float(), key.float(), 0.5, reduction))


@pytest.mark.parametrize("reduction", ["cls", "received"])
def test_nothing_as_large_as_heads_times_n_squared(reduction: Any) -> None:
    heads, n = 16, 729
    query, key = torch.randn(2, 1, heads, n, 2)
    with Largest() as seen:
        attention_scores(query, key, 1.0, reduction)
    assert seen.numel <= heads * n * n / 8
    with Largest() as whole:
        (query @ key.mT).softmax(-1)
    assert whole.numel >= heads * n * n, "the counter must see what it looks for"


@pytest.mark.parametrize("reduction", ["cls", "received"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_and_grouped_keys(reduction: Any, kind: str) -> None:
    """A masked-out key gets nothing; fewer key heads than query heads are shared among them."""
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8)
    seen = torch.rand(2, 1, 20, 20) > 0.3
    seen[..., 0] = True
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, 1)) * 0.3
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = weights[:, :, 0, 1:].mean(1) if reduction == "cls" else weights.mean((1, 2))
    torch.testing.assert_close(attention_scores(query, key, 0.3, reduction, mask), expected)


def test_two_threads_hear_their_own(load: Load) -> None:
    """One model, many threads: each hears its own call, and the layer is put back after the last."""
    model, _ = load()
    vision = model.model.vision_tower
    layer: Any = attention_layer(vision, -2)
    config = layer.config
    inputs = [torch.randn(1, 3, 28, 28) for _ in range(8)]
    with torch.no_grad():
        expected = [oracle.eager_scores(model, pixels, True) for pixels in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                with record_scores(layer, "cls", clock()) as recorder:
                    vision(inputs[i])
                if not torch.allclose(recorded(recorder)[0], expected[i], atol=1e-6):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert layer.config is config


def test_a_layer_that_is_not_called(load: Load) -> None:
    model, _ = load()
    with record_scores(attention_layer(model.model.vision_tower, -2), "cls", clock()) as recorder:
        pass
    with pytest.raises(ValueError, match="recorded 0 times"):
        recorded(recorder)


def test_layers_that_do_not_exist(load: Load) -> None:
    model, _ = load()
    for wrong in (0, 4, -4):
        with pytest.raises(ValueError, match=f"vision_feature_layer={wrong}"):
            attention_layer(model.model.vision_tower, wrong)


def test_other_towers(load: Load) -> None:
    model, _ = load()
    tower: Any = model.model.vision_tower
    tower.config.model_type = "pixtral"
    with pytest.raises(ValueError, match=r"'pixtral' is not supported: known are clip_vision_model, dinov2"):
        has_cls(tower)
    assert get_adapter(model).model_types == ("llava",)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["cls", "received"])
def test_padding_neither_attends_nor_is_attended_to(reduction: Any, masked: bool) -> None:
    """Each image of a batch has the scores that it has alone, whether or not the model's mask says what is padding."""
    query, key = torch.randn(2, 3, 4, 80, 8, generator=torch.Generator().manual_seed(0))
    lengths = (80, 50, 7)
    valid = torch.arange(80) < torch.tensor(lengths)[:, None]
    mask = valid[:, None, None] if masked else None
    scores = attention_scores(query, key, 0.5, reduction, mask, valid)
    first = 1 if reduction == "cls" else 0
    for i, n in enumerate(lengths):
        alone = attention_scores(query[i : i + 1, :, :n], key[i : i + 1, :, :n], 0.5, reduction)[0]
        torch.testing.assert_close(scores[i, : n - first], alone)
        assert not scores[i, n - first :].any()


@pytest.mark.usefixtures("as_published")
def test_casting_a_model_and_loading_it_in_bfloat16_select_the_same_tokens(load: Load) -> None:
    """`.to(torch.bfloat16)` also rounds the language model's rotary frequencies, which loading keeps in float32: the
    logits of the plain model differ, too. With the same frequencies the pruned answers are the same."""
    loaded, processor = load("llava", "clip", dtype=torch.bfloat16)
    cast = load("llava", "clip")[0].to(torch.bfloat16)
    inputs = prepare(processor, ["<s>user: <image> what is it?"], [[make_image(seed=4)]])
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    found = []
    for restore in (False, True):
        if restore:
            frequencies = loaded.model.language_model.rotary_emb.inv_freq
            cast.model.language_model.rotary_emb.inv_freq = frequencies.clone()
        for model in (loaded, cast):
            with torch.no_grad(), ClustRS(keep=3)(model) as handle:
                answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
            found.append((handle.last[0], answer))
    for image, _ in found[1:]:
        assert torch.equal(image.scores, found[0][0].scores)
        assert torch.equal(image.selection.indices, found[0][0].selection.indices)
        assert torch.equal(image.selection.tokens, found[0][0].selection.tokens)
    assert not torch.equal(found[1][1], found[0][1]), "the rounded frequencies flip this answer"
    assert torch.equal(found[3][1], found[0][1])
