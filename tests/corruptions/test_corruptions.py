"""Each corruption does what its rule says, to the pixel, and its randomness depends on four things only."""

import doctest
import io
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from clustrs import corruptions
from clustrs.corruptions import PAPER_LEVELS, Corruption
from clustrs.corruptions.images import cutout_size, line_kernel

EVERY = [Corruption(name, level) for name, levels in PAPER_LEVELS.items() for level in levels]


def noise_image(height: int = 60, width: int = 80, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def gray(value: int = 128, size: tuple[int, int] = (400, 300)) -> Image.Image:
    return Image.new("RGB", size, (value,) * 3)


def pixels(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


def applied(name: str, level: float, image: Image.Image, image_id: str = "v1_0", seed: int = 0) -> NDArray[np.int64]:
    return pixels(Corruption(name, level).apply(image, image_id, seed))


def test_paper_has_seven() -> None:
    assert list(PAPER_LEVELS) == [
        "gaussian",
        "salt_pepper",
        "brightness",
        "contrast",
        "cutout",
        "motion_blur",
        "jpeg",
    ]
    assert len(EVERY) == 23


@pytest.mark.parametrize("corruption", EVERY, ids=str)
def test_image_stays_an_image(corruption: Corruption) -> None:
    image = noise_image()
    before = pixels(image)
    corrupted = corruption.apply(image, "a")
    assert (corrupted.mode, corrupted.size) == ("RGB", image.size)
    assert (pixels(image) == before).all(), "the original was changed"
    assert (pixels(corrupted) != before).any()


@pytest.mark.parametrize("corruption", EVERY, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (3, 2), (3, 500), (500, 3)])
def test_tiny_images(corruption: Corruption, size: tuple[int, int]) -> None:
    assert corruption.apply(noise_image(*size), "a").size == size[::-1]


@pytest.mark.parametrize("corruption", EVERY, ids=str)
def test_same_seed_same_image_in_any_order(corruption: Corruption) -> None:
    images = {str(i): noise_image(seed=i) for i in range(4)}
    forward = {key: pixels(corruption.apply(image, key, 7)) for key, image in images.items()}
    np.random.default_rng().random(5)
    backward = {key: pixels(corruption.apply(images[key], key, 7)) for key in reversed(images)}
    assert all((forward[key] == backward[key]).all() for key in images)


@pytest.mark.parametrize("name", ["gaussian", "salt_pepper", "cutout", "motion_blur"])
def test_seed_names_image_level_and_run(name: str) -> None:
    image = noise_image()
    level = PAPER_LEVELS[name][0]
    first = applied(name, level, image, "a", 0)
    assert (first != applied(name, level, image, "b", 0)).any()
    assert (first != applied(name, level, image, "a", 1)).any()


def test_levels_and_corruptions_have_their_own_draws() -> None:
    draws = {Corruption(name, level)._random("a", 0).random() for name, level in [("cutout", 0.1), ("cutout", 0.25)]}
    draws |= {Corruption(name, 0.1)._random("a", 0).random() for name in ("gaussian", "salt_pepper")}
    assert len(draws) == 4


def test_seed_is_pinned() -> None:
    # Stored results name their seeds: these numbers must never change.
    image = gray(size=(3, 1))
    assert applied("gaussian", 0.1, image, "v1_0", 0).tolist() == [[[95, 91, 85], [153, 169, 136], [143, 128, 114]]]


def test_gaussian_moments() -> None:
    sigma = 0.1  # the clipping at 5 sigma is far away
    change = (applied("gaussian", sigma, gray()) - 128) / 255
    n = change.size
    rounding = 1 / 255**2 / 12
    assert abs(change.mean()) < 4 * sigma / math.sqrt(n)
    assert abs(change.var() - sigma**2 - rounding) < 4 * sigma**2 * math.sqrt(2 / n)
    assert abs(np.corrcoef(change[..., 0].ravel(), change[..., 1].ravel())[0, 1]) < 4 / math.sqrt(n / 3)


@pytest.mark.parametrize("sigma", PAPER_LEVELS["gaussian"][1:])
def test_gaussian_clips(sigma: float) -> None:
    corrupted = applied("gaussian", sigma, gray())
    for end, distance in ((0, 127.5 / 255), (255, 126.5 / 255)):  # from 128 to where a value rounds to the end
        beyond = math.erfc(distance / sigma / math.sqrt(2)) / 2
        assert abs((corrupted == end).mean() - beyond) < 4 * math.sqrt(beyond * (1 - beyond) / corrupted.size)


@pytest.mark.parametrize("rho", PAPER_LEVELS["salt_pepper"])
def test_salt_pepper_counts(rho: float) -> None:
    corrupted = applied("salt_pepper", rho, gray())
    n = corrupted.shape[0] * corrupted.shape[1]
    spread = 4 * math.sqrt(rho / 2 * (1 - rho / 2) / n)
    black, white = (corrupted == 0).all(-1), (corrupted == 255).all(-1)
    assert abs(black.mean() - rho / 2) < spread
    assert abs(white.mean() - rho / 2) < spread
    assert (corrupted[~black & ~white] == 128).all(), "a pixel changed in one channel only"


def test_salt_pepper_all() -> None:
    assert set(np.unique(applied("salt_pepper", 1, gray()))) == {0, 255}
    assert (applied("salt_pepper", 0, gray()) == 128).all()


@pytest.mark.parametrize("factor", [0, 0.5, 1, 1.5, 2])
def test_brightness_by_hand(factor: float) -> None:
    image = noise_image()
    expected = np.minimum(pixels(image) * factor, 255)
    assert np.abs(applied("brightness", factor, image) - expected).max() <= 0.5


@pytest.mark.parametrize("factor", PAPER_LEVELS["brightness"])
def test_brightness_is_pillows_but_rounded(factor: float) -> None:
    image = noise_image()
    more = applied("brightness", factor, image) - pixels(ImageEnhance.Brightness(image).enhance(factor))
    assert set(np.unique(more)) <= {0, 1}


@pytest.mark.parametrize("factor", [0, 0.5, 1, 1.5, 2])
def test_contrast_is_pillows(factor: float) -> None:
    image = noise_image()
    assert (applied("contrast", factor, image) == pixels(ImageEnhance.Contrast(image).enhance(factor))).all()


@pytest.mark.parametrize("size", [(300, 300), (400, 300), (100, 1000), (1000, 100), (1, 64), (64, 1), (2, 9)])
@pytest.mark.parametrize("share", [0, *PAPER_LEVELS["cutout"], 1])
def test_cutout_area(size: tuple[int, int], share: float) -> None:
    corrupted = applied("cutout", share, gray(size=size))
    black = (corrupted == 0).all(-1)
    rows, columns = np.flatnonzero(black.any(1)), np.flatnonzero(black.any(0))
    cut_height, cut_width = cutout_size(size[1], size[0], share)
    assert black.sum() == cut_height * cut_width
    if black.any():
        assert (int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1) == (cut_height, cut_width), "not one rectangle"
    area = share * size[0] * size[1]
    if math.sqrt(area) <= min(size):
        assert cut_height == cut_width
        assert abs(cut_height - math.sqrt(area)) <= 0.5
    else:
        assert min(cut_height, cut_width) == min(size)
        assert abs(cut_height * cut_width - area) <= min(size) / 2


def test_cutout_reaches_every_border() -> None:
    corrupted = [applied("cutout", 0.25, gray(size=(8, 8)), str(i)) == 0 for i in range(200)]
    corners = {(bool(black[0].any()), bool(black[:, 0].any())) for black in corrupted}
    assert len(corners) == 4
    assert any(black[-1].any() for black in corrupted)
    assert any(black[:, -1].any() for black in corrupted)


@pytest.mark.parametrize("size", [1, 3, 15, 31])
@pytest.mark.parametrize("angle", [0, 0.3, math.pi / 4, math.pi / 2, 2.5, math.pi])
def test_line_kernel(size: int, angle: float) -> None:
    kernel = line_kernel(size, angle)
    assert kernel.shape == (size, size)
    assert kernel.min() >= 0
    assert kernel.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(kernel, kernel[::-1, ::-1], atol=1e-12)  # the image does not move
    y, x = np.mgrid[:size, :size] - size // 2
    across = x * math.sin(angle) - y * math.cos(angle)
    assert np.abs(across[kernel > 1e-9]).max() < math.sqrt(2)


def test_line_kernel_straight() -> None:
    kernel = line_kernel(15, 0)
    np.testing.assert_allclose(kernel[7], 1 / 15)
    np.testing.assert_allclose(line_kernel(15, math.pi / 2), kernel.T, atol=1e-12)


@pytest.mark.parametrize("size", PAPER_LEVELS["motion_blur"])
def test_motion_blur_is_the_convolution(size: int) -> None:
    image = noise_image()
    kernel = line_kernel(int(size), Corruption("motion_blur", size)._random("a", 0).uniform(0, math.pi))
    reach = int(size) // 2
    padded = np.pad(pixels(image), ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape, axis=(0, 1))
    expected = np.einsum("hwcij,ij->hwc", windows, kernel)
    assert np.abs(applied("motion_blur", size, image, "a") - expected).max() <= 0.501


def test_motion_blur_of_one_color_and_of_one_pixel() -> None:
    assert (applied("motion_blur", 31, gray()) == 128).all()
    image = noise_image()
    assert (applied("motion_blur", 1, image) == pixels(image)).all()


@pytest.mark.parametrize("quality", [1, *PAPER_LEVELS["jpeg"], 95])
def test_jpeg_is_pillows(quality: int) -> None:
    image = noise_image()
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    assert (applied("jpeg", quality, image) == pixels(Image.open(file))).all()


def test_worse_quality_is_worse() -> None:
    image = noise_image()
    errors = [np.abs(applied("jpeg", quality, image) - pixels(image)).mean() for quality in (95, 60, 30)]
    assert errors == sorted(errors)


@pytest.mark.parametrize("corruption", EVERY, ids=str)
def test_parse_and_back(corruption: Corruption) -> None:
    assert Corruption.parse(str(corruption)) == corruption


def test_parse() -> None:
    assert Corruption.parse("gaussian:0.5") == Corruption("gaussian", 0.5)
    assert Corruption.parse("jpeg:60") == Corruption("jpeg", 60)
    assert str(Corruption("jpeg", 60)) == "jpeg:60"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gausian:0.5", r"unknown corruption 'gausian' \(did you mean 'gaussian'\?\); available: .*salt_pepper.*jpeg"),
        ("rain:x", "unknown corruption 'rain'; available: gaussian, .*, imagenet_c/jpeg_compression"),
        ("gaussian", "corruption must be NAME:LEVEL .*got 'gaussian'; names: gaussian, salt_pepper"),
        ("gaussian:", "must be NAME:LEVEL"),
        ("gaussian:a lot", "must be NAME:LEVEL"),
        ("", "must be NAME:LEVEL"),
        ("gaussian:-1", r"gaussian level must be a standard deviation from 0.*, got -1.0"),
        ("gaussian:nan", "gaussian level must be .*, got nan"),
        ("brightness:inf", "brightness level must be .*, got inf"),
        ("salt_pepper:1.1", r"salt_pepper level must be a fraction.*, got 1.1"),
        ("cutout:2", r"cutout level must be a fraction.*, got 2.0"),
        ("motion_blur:14", r"motion_blur level must be an odd number.*, got 14.0"),
        ("motion_blur:14.5", r"motion_blur level must be an odd number.*, got 14.5"),
        ("jpeg:0", r"jpeg level must be a quality.*, got 0.0"),
        ("jpeg:30.5", r"jpeg level must be a quality.*, got 30.5"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Corruption.parse(text)


def test_bad_arguments() -> None:
    corruption = Corruption("gaussian", 0.5)
    with pytest.raises(ValueError, match="image must be in RGB, got mode 'L'"):
        corruption.apply(Image.new("L", (4, 4)), "a")
    with pytest.raises(ValueError, match="image_id must be a string, got 3"):
        corruption.apply(gray(), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed must be an integer, got 0.5"):
        corruption.apply(gray(), "a", 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gaussian level must be .*, got True"):
        Corruption("gaussian", True)


def test_the_examples_in_docstrings() -> None:
    tried = doctest.testmod(corruptions)
    assert (tried.failed, tried.attempted > 0) == (0, True)
