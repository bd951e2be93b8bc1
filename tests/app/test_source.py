"""Sample images and uploads, and the levels that a slider offers."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clustrs.app.trial import Source, corrupted, data_uri, level_range, nearest_level, sample_sources, uploaded
from clustrs.corruptions import Corruption, corruption_rule, list_corruptions
from clustrs.embedded import samples


def test_samples_have_questions_with_answers() -> None:
    first = sample_sources("scenes")[0]
    assert first.expected("How many objects are there?") == "5"
    assert first.expected(" How many objects are there? ") == "5"
    assert first.expected("Why?") is None


def test_samples_of_the_models_task_come_first() -> None:
    for task in ("scenes", "photos"):
        names = [sample.path for sample in samples(task)]
        assert [source.path for source in sample_sources(task)][: len(names)] == names
    assert len(sample_sources("scenes")) == len(sample_sources()) == len(samples())


def test_upload_that_is_no_image_is_refused_by_its_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("no image")
    with pytest.raises(ValueError, match=r"^image 'notes\.png': not an image in any format") as caught:
        uploaded(path)
    assert str(tmp_path) not in str(caught.value)


def test_upload_of_an_enormous_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "enormous.png"
    Image.new("1", (9000, 9000)).save(path)
    with pytest.raises(ValueError, match=r"image 'enormous\.png': too large, 9000 x 9000"):
        uploaded(path)


def test_upload_has_no_known_answers(tmp_path: Path) -> None:
    path = tmp_path / "mine.png"
    Image.new("RGB", (20, 30), "red").save(path)
    source = uploaded(path)
    assert (source.name, source.questions, source.open().size) == ("mine.png", (), (20, 30))


@pytest.mark.parametrize("name", list_corruptions())
def test_every_level_of_a_slider_is_accepted(name: str) -> None:
    span, rule = level_range(name), corruption_rule(name)
    steps = round((span.maximum - span.minimum) / span.step)
    for level in (span.minimum, span.start, span.maximum, *(span.minimum + i * span.step for i in range(steps + 1))):
        assert rule.accepts(nearest_level(name, level))
    assert nearest_level(name, span.start) == span.start
    assert set(rule.levels) <= {nearest_level(name, level) for level in rule.levels}


def test_slider_levels_are_snapped_and_bounded() -> None:
    assert nearest_level("gaussian", 0.30000000000000004) == 0.3
    assert nearest_level("gaussian", 99) == 3.0
    assert nearest_level("motion_blur", 14) in (13, 15)
    assert nearest_level("jpeg", 0) == 1


def test_corrupted_image_is_that_of_the_command_line() -> None:
    source = sample_sources("scenes")[0]
    expected = Corruption("gaussian", 0.5).apply(source.open(), "scene-1.png", 3)
    assert np.array_equal(np.asarray(corrupted(source, "gaussian", 0.5, 3)), np.asarray(expected))
    assert np.array_equal(np.asarray(corrupted(source, "clean", 0.5, 3)), np.asarray(source.open()))


def test_large_images_are_shown_small() -> None:
    small, large = data_uri(Image.new("RGB", (100, 50))), data_uri(Image.effect_noise((4000, 2000), 90))
    assert small.startswith("data:image/webp;base64,")
    assert len(large) < 400_000


def test_source_reads_the_file_each_time(tmp_path: Path) -> None:
    path = tmp_path / "gone.png"
    Image.new("RGB", (8, 8)).save(path)
    source = Source(path, "gone.png")
    path.unlink()
    with pytest.raises(ValueError, match="there is no such file"):
        source.open()
