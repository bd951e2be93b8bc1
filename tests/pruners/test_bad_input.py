"""Bad input gives one clear error."""

from typing import Any

import pytest
import torch
from method_cases import METHODS, draw_image, rows, tensors

from clustrs import (
    ClustRS,
    FasterVLM,
    Grid,
    Layout,
    Pruner,
    PrunerInputs,
    Selection,
    VisionZip,
    VisPruner,
    get_method,
)

GOOD = torch.rand(2, 10, 4)
SCORES = torch.rand(2, 10)


def broken(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


@pytest.mark.parametrize(
    ("tokens", "attention", "words"),
    [
        ([[1.0]], SCORES, ["tokens must be a floating-point tensor, got list"]),
        (torch.ones(10, 4, dtype=torch.long), SCORES[0], ["tokens must be a floating-point tensor, got torch.int64"]),
        (torch.rand(4), SCORES[0], ["tokens must have shape [N, D], or [B, N, D] for a batch, got [4]"]),
        (torch.rand(1, 2, 3, 4), SCORES, ["got [1, 2, 3, 4]"]),
        (torch.rand(0, 10, 4), torch.rand(0, 10), ["at least one image", "got shape [0, 10, 4]"]),
        (torch.rand(2, 0, 4), torch.rand(2, 0), ["got shape [2, 0, 4]"]),
        (GOOD, None, ["scores is missing: clustrs needs it (write select(tokens, scores=...))"]),
        (GOOD, SCORES.tolist(), ["scores must be a floating-point tensor, got list"]),
        (GOOD, torch.rand(2, 9), ["scores must have shape [2, 10] for tokens of shape [2, 10, 4], got [2, 9]"]),
        (GOOD, torch.rand(10), ["scores must have shape", "got [10]"]),
        (GOOD[0], SCORES, ["scores must have shape [10]", "got [2, 10]"]),
        (GOOD, SCORES.to("meta"), ["scores must be on cpu, the device of the tokens, got meta"]),
        (GOOD, broken(SCORES, -0.5), ["scores must be finite", "got values from -0.5"]),
        (GOOD, broken(SCORES, torch.nan), ["scores must be finite", "got NaN"]),
        (GOOD, broken(SCORES, torch.inf), ["scores must be finite", "to inf"]),
        (broken(GOOD, torch.nan), SCORES, ["tokens must be finite", "got NaN"]),
        (broken(GOOD, -torch.inf), SCORES, ["tokens must be finite", "got values from -inf"]),
        (broken(GOOD, 1e25), SCORES, ["tokens must be finite", "1e+25", "1e+15"]),
    ],
)
def test_tokens_and_attention(tokens: Any, attention: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ClustRS(keep=3).select(tokens, attention)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("method", "states", "words"),
    [
        (VisPruner(keep=3), {}, ["hidden is missing", "vispruner", "select(tokens, hidden=...)"]),
        (VisionZip(keep=3), {"hidden": torch.rand(2, 11, 6)}, ["keys is missing", "visionzip"]),
        (
            VisionZip(keep=3),
            {"hidden": torch.rand(2, 11, 6), "keys": torch.rand(2, 11, 6)},
            ["projector is missing", "visionzip"],
        ),
        (
            VisPruner(keep=3),
            {"hidden": torch.rand(2, 10, 6)},
            ["hidden must have shape [2, 11, any] for tokens of shape [2, 10, 4], got [2, 10, 6]"],
        ),
        (VisPruner(keep=3), {"hidden": torch.rand(2, 11, 6), "cls": False}, ["[2, 10, any]"]),
        (
            VisPruner(keep=3),
            {"hidden": broken(torch.rand(2, 11, 6), torch.nan)},
            ["hidden must be finite", "got NaN"],
        ),
        (Grid(keep=3, columns=3), {}, ["columns must divide the number of tokens, 10, got 3"]),
    ],
)
def test_encoder_states(method: Any, states: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        method.select(GOOD, SCORES, **states)
    for word in words:
        assert word in str(error.value)


def test_value_checks_can_be_left_out_and_asked_for() -> None:
    bad = broken(SCORES, -1)
    assert FasterVLM(keep=3).select(GOOD, bad, check=False).indices.shape == (2, 3)
    with pytest.raises(ValueError, match=r"scores must be finite, from 0 to 1e.15, got values from -1"):
        FasterVLM(keep=3).select(GOOD, bad, check=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "parameters"), [(name, easy) for name, easy, _ in METHODS])
def test_unchecked_nonsense_still_gives_k_rows(name: str, parameters: dict[str, Any], value: float) -> None:
    tokens, attention, states = tensors([draw_image(0, 30, 4)] * 2)
    tokens[0, 3] = value
    attention[0, 5] = value
    result = get_method(name, keep=7, **parameters).select(tokens, attention, **states, check=False)
    assert result.tokens.shape == (2, 7, 4)
    if name == "divprune":
        assert all(len(set(indices)) == 7 for indices in result.indices.tolist())
    good = get_method(name, keep=7, **parameters).select(tokens[1:], attention[1:], **rows(states, slice(1, None)))
    assert torch.equal(result.indices[1:], good.indices), "the other image of the batch must not notice"


ZEROS = torch.zeros(10, dtype=torch.long)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(ZEROS.float(), ZEROS, ZEROS), ["layout.tile must be a tensor of integers, got torch.float32"]),
        (Layout(ZEROS, [0] * 10, ZEROS), ["layout.y must be a tensor of integers, got list"]),  # type: ignore[arg-type]
        (Layout(ZEROS, ZEROS, ZEROS[:9]), ["layout.x must have shape [10] for tokens of shape [2, 10, 4], got [9]"]),
        (Layout(ZEROS, ZEROS, ZEROS.to("meta")), ["layout.x must be on cpu", "got meta"]),
    ],
)
def test_layout(layout: Layout, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Grid(keep=3).select(GOOD, layout=layout)
    for word in words:
        assert word in str(error.value)


def test_question() -> None:
    assert FasterVLM(keep=3).select(GOOD, SCORES, question=torch.rand(2, 7, 4)).indices.shape == (2, 3)
    with pytest.raises(ValueError, match=r"question must have shape \[2, any, 4\] for tokens .*, got \[7, 4\]"):
        FasterVLM(keep=3).select(GOOD, SCORES, question=torch.rand(7, 4))


class Careless(Pruner):
    """Returns what it is told to."""

    name = "careless"
    answer: torch.Tensor

    def _choose(self, inputs: PrunerInputs, k: int) -> torch.Tensor:
        return self.answer.repeat(len(inputs.tokens), 1)


class CarelessMerger(Careless):
    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        return Selection(inputs.tokens[:, : k - 1], self.answer.repeat(len(inputs.tokens), 1))


@pytest.mark.parametrize(
    ("method", "answer", "words"),
    [
        (Careless, [1, 4, 1], "careless must return 3 distinct indices, got 2 duplicates of 6"),
        (Careless, [1, 4], "careless must return 3 indices for each image, got 2"),
        (Careless, [1, 4, 5, 6], "careless must return 3 indices for each image, got 4"),
        (Careless, [1, 4, 10], "careless must return indices from 0 to 9, got indices from 1 to 10"),
        (Careless, [1, 4, -2], "careless must return indices from 0 to 9, got indices from -2 to 4"),
        (CarelessMerger, [1, 4, 1], "careless must return 3 distinct indices, got 2 duplicates of 6"),
        (CarelessMerger, [1, 4, 5], r"careless must return tokens of shape \[2, 3, any\], got \[2, 2, 4\]"),
    ],
)
def test_a_careless_method_is_told(method: type[Careless], answer: list[int], words: str) -> None:
    careless = type("Told", (method,), {"answer": torch.tensor(answer)})(keep=3)
    with pytest.raises(ValueError, match=words):
        careless.select(GOOD)
