"""Corruptions of other packages: registered, loaded by entry points, listed, and used like our own."""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType

import numpy as np
import pytest
from PIL import Image, ImageDraw

from clustrs import corruptions, plugins
from clustrs.corruptions import Corruption, corruption_rule, list_corruptions, register_corruption
from clustrs.corruptions.contact_sheet import contact_sheet
from clustrs_models import imagenet_c

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table as it was; entry points are looked for anew."""
    monkeypatch.setattr(corruptions, "_rules", dict(corruptions._rules))
    monkeypatch.setattr(plugins, "_loaded", set())


def invert(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Invert a random part of the pixels."""
    pixels = np.array(image)
    hit = random.random(pixels.shape[:2]) < level
    pixels[hit] = 255 - pixels[hit]
    return Image.fromarray(pixels)


def test_a_registered_corruption_is_like_our_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert register_corruption("acme/invert", levels=[0.5, 1], low=0, high=1)(invert) is invert
    assert list_corruptions()[-1] == "acme/invert"
    image = Image.new("RGB", (20, 10), (255, 0, 9))
    some = Corruption.parse("acme/invert:0.5").apply(image, "a", 3)
    assert some == Corruption("acme/invert", 0.5).apply(image, "a", 3) != image
    assert Corruption("acme/invert", 1).apply(image, "a") == Image.new("RGB", (20, 10), (0, 255, 246))
    with pytest.raises(ValueError, match=r"acme/invert level must be a number from 0 to 1.*, got 2"):
        Corruption("acme/invert", 2)
    with pytest.raises(ValueError, match=r"unknown corruption 'acme/inverd' \(did you mean 'acme/invert'\?\)"):
        Corruption("acme/inverd", 1)
    code, out, _ = run("corruptions")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert ["acme/invert", "0.5 1", "a number from 0 to 1"] in rows
    written: list[str] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, xy, text, *_, **__: written.append(text))
    contact_sheet(image)
    assert written[written.index("Corruptions of other packages") :] == [
        "Corruptions of other packages",
        "acme/invert",
        "0.5",
        "1",
    ]


def test_studies_know_its_levels() -> None:
    from clustrs_paper.studies.settings import resolve_corruptions, strongest

    register_corruption("acme/invert", levels=[0.5, 1], low=0, high=1)(invert)
    assert list(map(str, resolve_corruptions("acme/invert", None))) == ["acme/invert:0.5", "acme/invert:1"]
    assert strongest("acme/invert") == (1.0,)


def test_names_and_levels_are_checked() -> None:
    for name in ("a:b", "a b", "a,b", ""):
        with pytest.raises(ValueError, match="must have no spaces, commas or colons"):
            register_corruption(name, levels=[1], low=0, high=1)(invert)
    for levels in ([], [2], [float("nan")]):
        with pytest.raises(ValueError, match="must be at least one, each a number from 0 to 1"):
            register_corruption("acme/invert", levels=levels, low=0, high=1)(invert)


def test_a_name_again() -> None:
    register_corruption("acme/invert", levels=[0.5], low=0, high=1)(invert)
    register_corruption("acme/invert", levels=[1], low=0, high=1)(invert)  # a notebook cell that is run twice
    assert corruption_rule("acme/invert").levels == (1.0,)
    with pytest.raises(
        ValueError, match=r"'gaussian' of .*test_corruption_registry: clustrs.corruptions.images has registered one"
    ):
        register_corruption("gaussian", levels=[1], low=0, high=1)(invert)
    assert corruption_rule("gaussian").high == 100


def test_entry_points_are_loaded_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Plugin(ModuleType):
        def __getattr__(self, name: str) -> object:
            loaded.append(name)
            register_corruption("acme/invert", levels=[0.5], low=0, high=1)(invert)
            return invert

    monkeypatch.setitem(sys.modules, "acme_corruptions", Plugin("acme_corruptions"))
    good = EntryPoint("acme", "acme_corruptions:effect", corruptions.ENTRY_POINTS)
    bad = EntryPoint("broken", "nowhere_to_be_found", corruptions.ENTRY_POINTS)
    groups = {"clustrs.corruptions": [bad, good]}
    monkeypatch.setattr(plugins, "plugin_entries", lambda group: groups[group])
    Corruption("gaussian", 1)
    assert loaded == []
    with pytest.warns(
        RuntimeWarning, match=r"entry point broken = .* in clustrs.corruptions failed \(ModuleNotFoundError: .*nowhere"
    ):
        assert str(Corruption("acme/invert", 0.5)) == "acme/invert:0.5"
    assert loaded == ["effect"]
    assert "acme/invert" in list_corruptions()
    assert loaded == ["effect"]


def test_imagenet_c_names_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(imagenet_c.FAMILIES) == corruptions.IMAGENET_C
    monkeypatch.setattr(corruptions, "data_package", lambda: None)
    assert not set(corruptions.list_corruptions()) & set(corruptions.IMAGENET_C_LEVELS)
    reason = "imagenet_c/fog is in the package clustrs-models, which is not installed: pip install"
    with pytest.raises(ValueError, match=reason):
        corruptions.Corruption("imagenet_c/fog", 1).apply(Image.new("RGB", (8, 8)), "a")
