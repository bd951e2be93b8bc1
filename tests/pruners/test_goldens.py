"""Recorded choices: those of the rivals' published rules, and those of release 0.1."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens.cases import KEEPS, as_tensors, images
from goldens.record import RELEASED, RIVALS

from clustrs import Selection, get_method

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


def same(result: Selection, stored: dict[str, Any]) -> bool:
    if result.indices.tolist() != stored["indices"]:
        return False
    sums = result.tokens.double().sum(-1)[:3]
    torch.testing.assert_close(sums, torch.tensor(stored["sum"]).double(), atol=1e-5, rtol=1.3e-6)  # float32's rounding
    if "alpha" in stored:
        assert result.alpha is not None
        torch.testing.assert_close(result.alpha[:5], torch.tensor(stored["alpha"]), atol=2e-5, rtol=1e-4)
    return True


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
