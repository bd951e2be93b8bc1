"""Attention scores: as eager attention reports them, from the right layer, without a heads x N x N tensor."""

from typing import Any

import oracle
import pytest
import torch
from tiny_models import PATCHES, TOWERS, Load
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clustrs.models import scoring as towers


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


@pytest.mark.parametrize("feature_layer", [-1, -2, -3, 1, 3])
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("running", ["sdpa", "eager"])
def test_scores_are_those_of_eager_attention(load: Load, tower: str, feature_layer: int, running: str) -> None:
    model, _ = load("llava", tower, attn_implementation=running)
    pixels = torch.randn(3, 3, 28, 28)
    vision = model.model.vision_tower
    cls = towers.has_cls(vision)
    with torch.no_grad():
        hidden_states = vision(pixels, output_hidden_states=True).hidden_states
    layer, at = towers.layer_before(vision, feature_layer)
    scores, keys = towers.look(layer, hidden_states[at], cls)
    model.config.vision_feature_layer = feature_layer if feature_layer < 0 else feature_layer - len(hidden_states)
    expected = oracle.eager_scores(model, pixels, cls)
    torch.testing.assert_close(scores, expected.detach(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(keys, oracle.keys_of(model, pixels).detach(), atol=1e-5, rtol=1e-4)
    assert scores.shape == (3, PATCHES)


@pytest.mark.parametrize("cls", [True, False])
def test_half_precision_scores_are_float32(cls: bool) -> None:
    layer = towers.Layer(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity(), 4, 0.5)
    hidden = torch.randn(2, 10, 8).bfloat16()
    scores, keys = towers.look(layer, hidden, cls)
    assert scores.dtype == keys.dtype == torch.float32
    assert torch.equal(scores, towers.look(layer, hidden.float(), cls)[0])


@pytest.mark.parametrize("cls", [True, False])
def test_nothing_as_large_as_heads_times_n_squared(cls: bool) -> None:
    heads, n, width = 16, 729, 32
    linear = torch.nn.Linear(width, width)
    layer = towers.Layer(torch.nn.LayerNorm(width), linear, linear, heads, 1.0)
    with Largest() as seen:
        towers.look(layer, torch.randn(1, n, width), cls)
    assert seen.numel <= heads * n * n / 8
    with Largest() as whole:
        towers.attend(torch.randn(1, heads, n, 2), torch.randn(1, heads, n, 2), 1.0)
    assert whole.numel >= heads * n * n, "the counter must see what it looks for"


def test_layers_that_do_not_exist(load: Load) -> None:
    model, _ = load()
    for wrong in (0, 4, -4):
        with pytest.raises(ValueError, match=f"vision_feature_layer={wrong}"):
            towers.layer_before(model.model.vision_tower, wrong)


def test_other_towers(load: Load) -> None:
    model, _ = load()
    tower: Any = model.model.vision_tower
    tower.config.model_type = "pixtral"
    with pytest.raises(ValueError, match=r"'pixtral' is not supported: known are clip_vision_model, dinov2"):
        towers.has_cls(tower)
