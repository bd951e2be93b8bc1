"""Bad input gives one clear error."""

from typing import Any

import pytest
import torch
from method_cases import METHODS, draw_image, tensors

from clustrs import (
    ClustRS,
    EncoderStates,
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
        ([[1.0]], SCORES, ["tokens is list", "floating-point tensor"]),
        (torch.ones(10, 4, dtype=torch.long), SCORES[0], ["tokens is torch.int64"]),
        (torch.rand(4), SCORES[0], ["tokens has shape [4]", "[N, D]", "[B, N, D]"]),
        (torch.rand(1, 2, 3, 4), SCORES, ["tokens has shape [1, 2, 3, 4]"]),
        (torch.rand(0, 10, 4), torch.rand(0, 10), ["tokens has shape [0, 10, 4]", "at least one image"]),
        (torch.rand(2, 0, 4), torch.rand(2, 0), ["tokens has shape [2, 0, 4]"]),
        (GOOD, None, ["attention is missing", "clustrs needs it"]),
        (GOOD, SCORES.tolist(), ["attention is list"]),
        (GOOD, torch.rand(2, 9), ["attention has shape [2, 9]", "[2, 10]", "tokens of shape [2, 10, 4]"]),
        (GOOD, torch.rand(10), ["attention has shape [10]"]),
        (GOOD[0], SCORES, ["attention has shape [2, 10]", "[10]"]),
        (GOOD, SCORES.to("meta"), ["attention is on meta", "tokens on cpu"]),
        (GOOD, broken(SCORES, -0.5), ["attention has values from -0.5"]),
        (GOOD, broken(SCORES, torch.nan), ["attention has NaN"]),
        (GOOD, broken(SCORES, torch.inf), ["attention has values", "to inf"]),
        (broken(GOOD, torch.nan), SCORES, ["tokens has NaN"]),
        (broken(GOOD, -torch.inf), SCORES, ["tokens has values from -inf"]),
        (broken(GOOD, 1e25), SCORES, ["tokens has values", "1e+25", "1e+15"]),
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
        (VisPruner(keep=3), None, ["hidden is missing", "vispruner", "EncoderStates(hidden=...)"]),
        (VisionZip(keep=3), EncoderStates(hidden=torch.rand(2, 11, 6)), ["keys is missing", "visionzip"]),
        (
            VisionZip(keep=3),
            EncoderStates(torch.rand(2, 11, 6), torch.rand(2, 11, 6)),
            ["projector is missing", "visionzip"],
        ),
        (
            VisPruner(keep=3),
            EncoderStates(torch.rand(2, 10, 6)),
            ["states.hidden has shape [2, 10, 6]", "[2, 11, any]"],
        ),
        (VisPruner(keep=3), EncoderStates(torch.rand(2, 11, 6), cls=False), ["[2, 10, any]"]),
        (VisPruner(keep=3), EncoderStates(broken(torch.rand(2, 11, 6), torch.nan)), ["states.hidden has NaN"]),
        (Grid(keep=3, columns=3), None, ["columns=3", "10 tokens"]),
    ],
)
def test_encoder_states(method: Any, states: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        method.select(GOOD, SCORES, states)
    for word in words:
        assert word in str(error.value)


def test_value_checks_can_be_left_out_and_asked_for() -> None:
    bad = broken(SCORES, -1)
    assert FasterVLM(keep=3).select(GOOD, bad, check=False).indices.shape == (2, 3)
    with pytest.raises(ValueError, match="attention has values from -1"):
        FasterVLM(keep=3).select(GOOD, bad, check=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "parameters"), [(name, easy) for name, easy, _ in METHODS])
def test_unchecked_nonsense_still_gives_k_rows(name: str, parameters: dict[str, Any], value: float) -> None:
    tokens, attention, states = tensors([draw_image(0, 30, 4)] * 2)
    tokens[0, 3] = value
    attention[0, 5] = value
    result = get_method(name, keep=7, **parameters).select(tokens, attention, states, check=False)
    assert result.tokens.shape == (2, 7, 4)
    if name == "divprune":
        assert all(len(set(indices)) == 7 for indices in result.indices.tolist())
    good = get_method(name, keep=7, **parameters).select(tokens[1:], attention[1:], states_row(states))
    assert torch.equal(result.indices[1:], good.indices), "the other image of the batch must not notice"


def states_row(states: EncoderStates) -> EncoderStates:
    assert states.hidden is not None
    assert states.keys is not None
    return EncoderStates(states.hidden[1:], states.keys[1:], states.projector, states.cls)


ZEROS = torch.zeros(10, dtype=torch.long)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(ZEROS.float(), ZEROS, ZEROS), ["layout.tile is torch.float32", "integers"]),
        (Layout(ZEROS, [0] * 10, ZEROS), ["layout.y is list"]),  # type: ignore[arg-type]
        (Layout(ZEROS, ZEROS, ZEROS[:9]), ["layout.x has shape [9]", "[10]", "tokens of shape [2, 10, 4]"]),
        (Layout(ZEROS, ZEROS, ZEROS.to("meta")), ["layout.x is on meta"]),
    ],
)
def test_layout(layout: Layout, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Grid(keep=3).select(GOOD, layout=layout)
    for word in words:
        assert word in str(error.value)


def test_question() -> None:
    assert FasterVLM(keep=3).select(GOOD, SCORES, question=torch.rand(2, 7, 4)).indices.shape == (2, 3)
    with pytest.raises(ValueError, match=r"question has shape \[7, 4\]: \[2, any, any\] goes with tokens"):
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
        (Careless, [1, 4, 1], "careless returned duplicate indices"),
        (Careless, [1, 4], "careless returned too few indices: 2 instead of 3"),
        (Careless, [1, 4, 5, 6], "careless returned too many indices: 4 instead of 3"),
        (Careless, [1, 4, 10], "careless returned indices from 1 to 10: there are 10 tokens"),
        (Careless, [1, 4, -2], "careless returned indices from -2 to 4"),
        (CarelessMerger, [1, 4, 1], "careless returned duplicate indices"),
        (CarelessMerger, [1, 4, 5], r"careless returned tokens of shape \[2, 2, 4\]"),
    ],
)
def test_a_careless_method_is_told(method: type[Careless], answer: list[int], words: str) -> None:
    careless = type("Told", (method,), {"answer": torch.tensor(answer)})(keep=3)
    with pytest.raises(ValueError, match=words):
        careless.select(GOOD)
