"""The rivals on tokens of the embedded model, where flat backgrounds make near-ties common."""

from functools import cache
from typing import Any

import pytest
import reference
import torch
from PIL import Image as PillowImage
from reference import selection
from transformers import AutoModelForImageTextToText, AutoProcessor

import clustrs
from clustrs import get_method
from clustrs.embedded import HERE, model_folder


@cache
def image_inputs(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, attention, hidden states and stand-ins for keys of a sample image."""
    folder = model_folder("mini-llava")
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    processor: Any = AutoProcessor.from_pretrained(folder)
    with PillowImage.open(HERE / "images" / name) as opened, torch.no_grad():
        pixels = processor.image_processor(opened.convert("RGB"), return_tensors="pt")["pixel_values"]
        out = model.model.vision_tower(pixels, output_hidden_states=True, output_attentions=True)
        layer = model.config.vision_feature_layer
        hidden = out.hidden_states[layer]
        tokens = model.model.multi_modal_projector(hidden[:, 1:])
    return tokens[0], out.attentions[layer][0, :, 0, 1:].mean(0), hidden[0], hidden[0, :, :16]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scene-1.png", "rocket.jpg"])
def test_the_published_rules_on_a_clean_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, attention, hidden, keys = image_inputs(name)
    known: dict[int, Any] = {}
    slow = selection.all_cosines
    monkeypatch.setattr(selection, "all_cosines", lambda rows: known.setdefault(rows.shape[1], slow(rows)))
    matrix = torch.eye(hidden.shape[1])
    rows, scores, states, key_rows, projector = (
        part.double().numpy() for part in (tokens, attention, hidden, keys, matrix)
    )
    image = reference.Image(rows, scores, states, key_rows, projector, cls=True)
    for keep in (16, 50, 144):
        for rival in ("fastervlm", "divprune", "visionzip", "vispruner"):
            method = get_method(rival, keep=keep)
            result = method.select(tokens, attention, hidden=hidden, keys=keys, projector=torch.clone)
            assert result.indices.tolist() == reference.run(method, image).indices, (rival, keep)
    assert clustrs.ClustRS(keep=16).select(tokens, attention).indices.unique().numel() == 16
