"""model_args of lmms-eval: read in full, refused with a reason."""

from typing import Any

import pytest

from clustrs import __version__
from clustrs.corruptions import Corruption
from clustrs.pruners import get_method
from clustrs_lmms.engine import read_arguments

GIVEN = {"pretrained": "mini-llava", "keep": 16}


def test_defaults() -> None:
    arguments = read_arguments(GIVEN)
    assert arguments.method == get_method("clustrs", keep=16)
    assert arguments.corrupt is None
    assert (arguments.seed, arguments.batch_size, arguments.prompt_template) == (0, 1, "checkpoint")


def test_parameters_of_the_method_stand_beside_the_settings() -> None:
    given = {**GIVEN, "tau": 2, "shrink": False, "clip": "[0.2,0.9]", "batch_size": "8", "image_padding": "square"}
    arguments = read_arguments(given)
    assert arguments.method == get_method("clustrs", keep=16, tau=2, shrink=False, clip=(0.2, 0.9))
    assert arguments.batch_size == 8
    assert arguments.image_padding == "square"


def test_a_method_may_bring_its_parameters() -> None:
    """Also those whose names are settings: the seed of the method is not that of the corruption."""
    arguments = read_arguments({**GIVEN, "method": "random seed=5", "seed": 7})
    assert arguments.method == get_method("random", keep=16, seed=5)
    assert arguments.seed == 7


def test_a_method_that_keeps_everything_needs_no_keep() -> None:
    assert read_arguments({"pretrained": "mini-llava", "method": "none"}).method == get_method("none")


def test_a_method_around_another() -> None:
    arguments = read_arguments({**GIVEN, "method": "denoise inner=divprune"})
    assert arguments.method == get_method("denoise", keep=16, inner="divprune")


def test_what_is_not_given_is_left_out() -> None:
    """lmms-eval hands over None for options of the command that were not given."""
    arguments = read_arguments({**GIVEN, "device": None, "max_batch_size": None})
    assert arguments.device is None


def test_everything_is_recorded() -> None:
    given = {**GIVEN, "method": "divprune", "corrupt": "gaussian:0.5", "seed": 2, "dtype": "float32"}
    record = read_arguments(given).to_json()
    assert record["clustrs"] == __version__
    assert record["method"] == get_method("divprune", keep=16).to_dict()
    assert record["corrupt"] == str(Corruption("gaussian", 0.5))
    assert record["seed"] == 2
    assert record["dtype"] == "float32"
    assert "device" not in record
    assert read_arguments(GIVEN).to_json()["corrupt"] == "clean"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": 16}, "pretrained is missing"),
        ({"pretrained": "mini-llava"}, "keep is missing"),
        ({**GIVEN, "keep": 0}, "keep must be .*, got 0"),
        ({**GIVEN, "method": "clustr"}, r"unknown method 'clustr' \(did you mean 'clustrs'\?\)"),
        ({**GIVEN, "method": 3}, "method must be the name of a method .*, got 3"),
        (
            {**GIVEN, "tua": 2},
            r"unknown argument tua=2 \(did you mean 'tau'\?\) \(accepted: attention, attn, ",
        ),
        ({**GIVEN, "method": "divprune", "tau": 2}, "unknown argument tau=2 .* or a parameter of divprune"),
        ({**GIVEN, "attn_implementation": "sdpa"}, "attn_implementation='sdpa'"),
        ({**GIVEN, "corrupt": "gaussian"}, "corruption must be NAME:LEVEL"),
        ({**GIVEN, "corrupt": 0.5}, "corrupt must be NAME:LEVEL .*, got 0.5"),
        ({**GIVEN, "seed": -1}, "seed must be an integer from 0 .*, got -1"),
        ({**GIVEN, "seed": 0.5}, "seed is not valid, got 0.5"),
        ({**GIVEN, "batch_size": "auto"}, "batch_size must be an integer of at least 1, got 'auto'"),
        ({**GIVEN, "batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({**GIVEN, "dtype": "half"}, "dtype must be one of 'auto', 'float32'.*, got 'half'"),
        ({**GIVEN, "prompt_template": "llava"}, "prompt_template must be one of .*, got 'llava'"),
        ({**GIVEN, "load_in_8bit": "maybe"}, "load_in_8bit is not valid, got 'maybe'"),
    ],
)
def test_mistakes_are_told_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_arguments(given)
    assert "\n" not in str(error.value)
