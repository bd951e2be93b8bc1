"""The families of ImageNet-C give what the package they come from gives, for every size of image."""

import colorsys
import io
from pathlib import Path

import numpy as np
import pytest
from corruptions.record_imagenet_c import PART, RECORD, make_image
from numpy.typing import NDArray
from PIL import Image

from clustrs.corruptions import IMAGENET_C_LEVELS, PAPER_LEVELS, Corruption
from clustrs_models import imagenet_c

EVERY = [Corruption(name, severity) for name, severities in IMAGENET_C_LEVELS.items() for severity in severities]
pytestmark = pytest.mark.usefixtures("frost")


def pixels(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


def corrupted(family: str, severity: int, image: Image.Image) -> NDArray[np.int64]:
    return pixels(Corruption(f"imagenet_c/{family}", severity).apply(image, "picture", 7))


def test_fifteen_families() -> None:
    names = """gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog
        brightness contrast elastic_transform pixelate jpeg_compression"""
    assert list(IMAGENET_C_LEVELS) == [f"imagenet_c/{name}" for name in names.split()]
    assert set(IMAGENET_C_LEVELS.values()) == {(1, 2, 3, 4, 5)}
    assert not set(IMAGENET_C_LEVELS) & set(PAPER_LEVELS)


@pytest.mark.parametrize("corruption", EVERY, ids=str)
def test_as_the_library(corruption: Corruption) -> None:
    """With the same draws, the library's image; where its rounding errors cut off a whole level, one more."""
    image = make_image()
    with np.load(RECORD) as record:
        expected = record[str(corruption)].astype(np.int64)
    ours = pixels(corruption.apply(image, "picture", 7))[PART]
    error = ours - expected
    if corruption.name == "imagenet_c/frost":  # the library enlarges photographs with another cubic
        assert np.abs(error).max() <= 2
        assert np.abs(error).mean() < 0.4
    else:
        assert error.min() >= 0
        assert error.max() <= 1
        assert error.mean() < 0.05
    assert np.abs(expected - pixels(image)[PART]).mean() > 1, "the record shows the clean image"


@pytest.mark.parametrize("corruption", EVERY, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (1, 50), (3, 500), (7, 5), (33, 32), (130, 97)])
def test_any_size(corruption: Corruption, size: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    before = pixels(image)
    result = corruption.apply(image, "a")
    assert (result.mode, result.size) == ("RGB", image.size)
    assert (pixels(image) == before).all(), "the original was changed"
    if min(size) > 30:
        assert (pixels(result) != before).any()


BLURS = ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform", "contrast", "pixelate"]


@pytest.mark.parametrize("family", BLURS)
@pytest.mark.parametrize("value", [0, 77, 255])
def test_one_color_stays(family: str, value: int) -> None:
    result = corrupted(family, 3, Image.new("RGB", (64, 41), (value, 128, 255 - value)))
    assert (result == (value, 128, 255 - value)).all()


@pytest.mark.parametrize("family", ["gaussian_noise", "shot_noise", "impulse_noise", "contrast", "brightness"])
def test_severer_is_worse(family: str) -> None:
    image = make_image()
    errors = [np.abs(corrupted(family, severity, image) - pixels(image)).mean() for severity in range(1, 6)]
    assert errors == sorted(set(errors))


@pytest.mark.parametrize(("severity", "quality"), [(1, 25), (2, 18), (3, 15), (4, 10), (5, 7)])
def test_jpeg_is_pillows(severity: int, quality: int) -> None:
    image = make_image()
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    assert (corrupted("jpeg_compression", severity, image) == pixels(Image.open(file))).all()


def test_pixelate_has_blocks() -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    result = corrupted("pixelate", 5, image)
    blocks = pixels(image).reshape(10, 4, 15, 4, 3).mean(axis=(1, 3))
    assert np.abs(result - blocks.repeat(4, 0).repeat(4, 1)).max() <= 1
    assert (result[::4, ::4].repeat(4, 0).repeat(4, 1) == result).all()


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_brightness_adds_to_the_value(severity: int) -> None:
    image = make_image()
    result = corrupted("brightness", severity, image)
    for (y, x), _ in np.ndenumerate(np.zeros((61, 47))):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixels(image)[y, x] / 255)
        expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(1.0, value + severity / 10)))
        np.testing.assert_allclose(result[y, x], np.floor(expected * 255 + 1e-6), atol=0)


def test_contrast_is_a_blend() -> None:
    image = make_image()
    mean = pixels(image).mean(axis=(0, 1))
    expected = Image.blend(Image.new("RGB", image.size, tuple(map(round, mean))), image, 0.2)
    assert np.abs(corrupted("contrast", 3, image) - pixels(expected)).max() <= 1


def test_impulse_counts() -> None:
    result = corrupted("impulse_noise", 4, Image.new("RGB", (400, 300), (128, 128, 128)))
    for end in (0, 255):
        assert abs((result == end).mean() - 0.17 / 2) < 4 * np.sqrt(0.085 * 0.915 / result.size)
    assert set(np.unique(result)) == {0, 128, 255}


def test_shot_noise_moments() -> None:
    counts = corrupted("shot_noise", 2, Image.new("RGB", (400, 300), (102, 102, 102))) / 255 * 25
    mean = 102 / 255 * 25  # the largest that is not clipped, 25, is five deviations away
    assert abs(counts.mean() + 0.05 - mean) < 0.06  # cutting off takes half a level, 0.05, at most
    assert abs(counts.var() / mean - 1) < 4 * np.sqrt(2 / counts.size) + 0.01


@pytest.mark.parametrize(("height", "width", "far"), [(30, 40, 1), (25, 23, 4), (9, 60, 3), (4, 4, 2), (1, 1, 1)])
def test_wandering_is_one_copy_after_the_other(height: int, width: int, far: int) -> None:
    source = imagenet_c.wandering(height, width, far, np.random.default_rng(3))
    random = np.random.default_rng(3)
    expected = np.arange(height * width).reshape(height, width)
    for y in range(height - far, far, -1):
        for x in range(width - far, far, -1):
            right, down = random.integers(-far, far, 2)
            expected[y, x] = expected[y + down, x + right]
    assert (source == expected.ravel()).all()


def test_frost_needs_photographs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    corruption = Corruption.parse("imagenet_c/frost:2")
    assert len(imagenet_c.frost_photographs()) == 5
    (tmp_path / "imagecorruptions").mkdir()  # a package without photographs
    (tmp_path / "imagecorruptions" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"imagenet_c/frost needs .*: pip install --no-deps imagecorruptions"):
        corruption.apply(make_image(), "a")
    monkeypatch.setattr(imagenet_c, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps imagecorruptions"):
        corruption.apply(make_image(), "a")


def test_frost_covers_a_image_larger_than_the_photograph() -> None:
    dark = Image.new("RGB", (300, 400))
    result = corrupted("frost", 1, dark)
    assert result.max() > 90  # 0.4 of a white crest
    assert (result.max(axis=(1, 2)) > 0).mean() > 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imagenet_c/fog:0", r"imagenet_c/fog level must be a severity \(an integer\) from 1 to 5.*, got 0.0"),
        ("imagenet_c/fog:6", r"imagenet_c/fog level must be a severity.*, got 6.0"),
        ("imagenet_c/fog:2.5", r"imagenet_c/fog level must be a severity.*, got 2.5"),
        ("imagenet_c/fog:nan", r"imagenet_c/fog level must be a severity.*, got nan"),
        ("imagenet_c/fog", "corruption must be NAME:LEVEL"),
        ("imagenet_c/frog:1", r"did you mean 'imagenet_c/fog'\?\); available: gaussian, .*imagenet_c/jpeg"),
        ("fog:1", r"unknown corruption 'fog' \(did you mean 'imagenet_c/fog'\?\)"),
        ("zoom_blurr:1", r"did you mean 'imagenet_c/zoom_blur'\?"),
        ("Contrast:1", r"did you mean 'contrast'\?"),
        ("imagenet_c/:1", r"unknown corruption 'imagenet_c/'"),
        ("imagenet_c/gaussian:1", r"did you mean 'imagenet_c/gaussian_noise'\?"),
    ],
)
def test_bad_names_and_severities(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Corruption.parse(text)


def test_parse_and_back() -> None:
    assert Corruption.parse("imagenet_c/fog:3") == Corruption("imagenet_c/fog", 3)
    assert all(Corruption.parse(str(corruption)) == corruption for corruption in EVERY)
