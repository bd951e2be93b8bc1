"""Recorded choices: those of the rivals' published rules, and those of release 0.1."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from goldens.cases import KEEPS, Prompt, as_tensors, as_video, images, prompts
from goldens.record import COMPOSED, GROUPS, INSIDE, RELEASED, RIVALS, VIDEO
from torch import Tensor

from clustrs import InsidePruner, Selection, get_method
from clustrs.models.inside import InsideCall, PromptImage

FOLDER = Path(__file__).parent.parent / "goldens"
CHANGED: dict[str, dict[str, tuple[int, ...]]] = {
    "divprune": {f"near duplicates {index}": KEEPS for index in (2, 6, 10)},
    "vispruner": {
        "noise 0": (16, 50),
        "clumps 1": KEEPS,
        "near duplicates 2": KEEPS,
        "noise 4": (50, 144),
        "clumps 5": KEEPS,
        "near duplicates 6": KEEPS,
        "clumps 9": (16,),
        "near duplicates 10": KEEPS,
    },
}
"""Where release 0.1 rounded cosines and chose otherwise than the published rule; rivals.json has the right choice."""

AT_THE_EDGE = {("denoise", "clumps 5", 144): {306}}
"""Tokens with two kept ones at distances that differ by 0.999 of what counts as rounding, by 1.005 in float32."""


def load(name: str) -> dict[str, dict[str, Any]]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_choose_what_their_authors_rules_choose(name: str) -> None:
    recorded = load("rivals.json")[name]
    assert len(recorded) == 120
    for title, image in images(40):
        inputs = as_tensors(image)
        for keep in KEEPS:
            expected = recorded.pop(f"{title}, k = {keep}")
            result = get_method(name, keep=keep).select(inputs)
            assert result.indices.tolist() == expected["indices"], (title, keep)
            if "labels" in expected:
                assert result.labels is not None
                assert result.labels.tolist() == expected["labels"], (title, keep)
    assert not recorded


@pytest.mark.parametrize("name", VIDEO)
def test_rivals_choose_of_a_video_what_their_authors_rules_choose(name: str) -> None:
    recorded = load("video.json")[name]
    assert len(recorded) == 36
    for title, image in images(12):
        for keep in KEEPS:
            expected = recorded.pop(f"{title}, k = {keep}")
            result = get_method(name, keep=keep).select(as_tensors(as_video(image)))
            assert result.indices.tolist() == expected["indices"], (title, keep)
    assert not recorded


class Layer(torch.nn.Module):
    """A decoder layer that computes nothing: its queries and keys are those of a prompt."""

    call: InsideCall

    def __init__(self, index: int, prompt: Prompt) -> None:
        super().__init__()
        self.layer_idx, self.prompt = index, prompt

    @property
    def self_attn(self) -> "Layer":
        return self

    def input_layernorm(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, **given: Any) -> None:
        """Attend: only the last query is read, so all are alike."""
        states = self.prompt.queries[self.layer_idx], self.prompt.keys[self.layer_idx]
        query, keys = (torch.from_numpy(part).float() for part in states)
        columns = self.call.key_columns(self.layer_idx)
        keys = keys if columns is None else keys[columns[0]]
        queries = query[None, :, None].expand(-1, -1, len(keys), -1)
        self.call.record(self, queries, keys.transpose(0, 1)[None], 0.5, None)


def prune_inside(method: InsidePruner, prompt: Prompt) -> list[int]:
    """What is left of the image after the last layer."""
    layers = [Layer(index, prompt) for index in range(len(prompt.keys))]
    image, width = torch.tensor(prompt.image), prompt.keys.shape[1]
    held = PromptImage(0, image, image)
    decoder = SimpleNamespace(layers=layers, norm=lambda hidden: hidden, training=False)
    call = InsideCall(method, decoder, (), [held], torch.ones(1, width))
    hidden = torch.from_numpy(prompt.hidden).float()
    for layer in layers:
        layer.call = call
        columns = call.key_columns(layer.layer_idx - 1)
        own = hidden[layer.layer_idx] if columns is None else hidden[layer.layer_idx][columns[0]]
        call.before(layer, (own[None],), {"position_embeddings": (), "past_key_values": None})
        if call.layer is layer:
            layer()
    return held.left().tolist()


@pytest.mark.parametrize("name", INSIDE)
def test_methods_inside_the_language_model_choose_what_their_authors_rules_choose(name: str) -> None:
    recorded = load("inside.json")[name]
    assert len(recorded) == 60
    for title, prompt, _ in prompts(20):
        for keep in KEEPS:
            method = get_method(name, keep=keep)
            assert isinstance(method, InsidePruner)
            assert prune_inside(method, prompt) == recorded.pop(f"{title}, k = {keep}")["indices"], (title, keep)
    assert not recorded


def test_compose_prunes_what_its_first_method_kept() -> None:
    recorded = load("inside.json")["compose"]
    assert len(recorded) == 60
    for title, prompt, image in prompts(20):
        for keep in KEEPS:
            first, second = get_method("compose", keep=keep, **COMPOSED).parts()
            assert second is not None
            encoded = first.select(as_tensors(image)).indices.tolist()
            short = prompt.without([i for i in range(len(prompt.image)) if i not in encoded])
            indices = [encoded[i] for i in prune_inside(second, short)]
            assert indices == recorded.pop(f"{title}, k = {keep}")["indices"], (title, keep)
    assert not recorded


def same(result: Selection, stored: dict[str, Any]) -> bool:
    if result.indices.tolist() != stored["indices"]:
        return False
    sums = result.tokens.double().sum(-1)[:3]
    torch.testing.assert_close(sums, torch.tensor(stored["sum"]).double(), atol=1e-5, rtol=1.3e-6)  # float32's rounding
    if "alpha" in stored:
        assert result.alpha is not None
        torch.testing.assert_close(result.alpha[:5], torch.tensor(stored["alpha"]), atol=2e-5, rtol=1e-4)
    return True


@pytest.mark.parametrize("label", GROUPS)
def test_methods_that_group_tokens_do_as_their_references_did(label: str) -> None:
    recorded = load("groups.json")[label]
    assert len(recorded) == 36
    name, parameters = GROUPS[label]
    for title, image in images(12):
        for keep in KEEPS:
            stored = recorded.pop(f"{title}, k = {keep}")
            result = get_method(name, keep=keep, **parameters).select(as_tensors(image))
            assert same(result, stored), (title, keep)
            assert result.labels is not None
            pairs = enumerate(zip(result.labels.tolist(), stored["labels"], strict=True))
            assert {i for i, (ours, theirs) in pairs if ours != theirs} == AT_THE_EDGE.get((label, title, keep), set())
    assert not recorded


@pytest.mark.parametrize("label", RELEASED)
def test_what_changed_since_release_0_1(label: str) -> None:
    recorded = load("release-0.1.json")[label]
    name, parameters = RELEASED[label]
    changed = set()
    for title, image in images(12):
        inputs = as_tensors(image)
        for keep in KEEPS:
            stored = recorded.pop(f"{title}, k = {keep}")
            if not same(get_method(name, keep=keep, **parameters).select(inputs), stored):
                changed.add(f"{title}, k = {keep}")
    assert not recorded
    assert changed == {f"{title}, k = {k}" for title, keeps in CHANGED.get(label, {}).items() for k in keeps}
