"""Opening videos: which frames are taken, and one clear error for whatever is wrong with a file."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clustrs.corruptions import videos
from clustrs.corruptions.videos import is_video, open_video

av = pytest.importorskip("av")


def write(path: Path, count: int, size: tuple[int, int] = (64, 48), title: str = "") -> Path:
    """A clip whose frames get brighter from 0 to 200."""
    with av.open(str(path), "w") as container:
        container.metadata["title"] = title
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(count):
            gray = 200 * i // max(1, count - 1)
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", size, (gray,) * 3))))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(("count", "frames"), [(1, 4), (3, 8), (8, 8), (50, 8), (33, 5), (40, 1)])
def test_frames_are_evenly_spaced(tmp_path: Path, count: int, frames: int) -> None:
    taken = open_video(write(tmp_path / "clip.mp4", count), frames)
    assert len(taken) == min(count, frames)
    assert {frame.size for frame in taken} == {(64, 48)}
    shades = [float(np.asarray(frame).mean()) for frame in taken]
    if len(taken) > 1:
        np.testing.assert_allclose(shades, np.linspace(0, 200, len(taken)), atol=200 / frames)
        assert shades[0] < 8
        assert shades[-1] > 192


def test_what_is_wrong_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write(tmp_path / "good.mp4", 30)
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video at all" * 100)
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(good.read_bytes()[:200])
    for path, message in (
        (tmp_path / "none.mp4", "there is no such file"),
        (tmp_path, "not a file"),
        (broken, "could not be read: "),
        (cut, "could not be read: "),
    ):
        with pytest.raises(ValueError, match=message) as error:
            open_video(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="frames must be an integer from 1 to 64, got 65"):
        open_video(good, 65)
    monkeypatch.setattr(videos, "MAX_FRAMES", 20)
    with pytest.raises(ValueError, match="could not be read: it has more than 20 frames"):
        open_video(good)
    monkeypatch.setattr(videos, "MAX_FRAMES", 10**6)
    monkeypatch.setattr(videos, "MAX_SECONDS", 1.0)
    with pytest.raises(ValueError, match="could not be read: it is longer than 1 seconds"):
        open_video(good)
    monkeypatch.setattr("clustrs.corruptions.images.MAX_PIXELS", 1000)
    with pytest.raises(ValueError, match="too large, 64 x 48"):
        open_video(good)


def test_no_other_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Playlists name further files, which would be looked for where the program runs."""
    write(tmp_path / "other.mp4", 3)
    monkeypatch.chdir(tmp_path)
    playlist, image = tmp_path / "playlist.mp4", tmp_path / "image.mp4"
    playlist.write_text("ffconcat version 1.0\nfile other.mp4\n")
    Image.new("RGB", (20, 20)).save(image, "PNG")
    for path in (playlist, image):
        with pytest.raises(ValueError, match=r"could not be read: it is none of \.mp4, \.mov"):
            open_video(path)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write(tmp_path / "good.mp4", 30)
    monkeypatch.setattr(videos, "MOST_PIXELS", 8 * 64 * 48)
    assert len(open_video(good, 8)) == 8
    with pytest.raises(ValueError, match="could not be read: 9 frames of 64 x 48 have more than 24,576 pixels"):
        open_video(good, 9)


def test_a_title_in_another_encoding_and_a_file_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write(tmp_path / "good.mp4", 3, title="clip clip clip")
    good.write_bytes(good.read_bytes().replace(b"clip clip clip", b"\xff\xfe\xfd\xfc\xfb\xfa\xf0clip123"))
    assert len(open_video(good)) == 3

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(videos, "open_regular", refuse)
    with pytest.raises(ValueError, match=r"good\.mp4' could not be read: Permission denied$"):
        open_video(good)


def test_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "clip.mp4", 2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"videos need PyAV \(pip install av\)"):
        open_video(path)


def test_names_of_videos() -> None:
    assert is_video("a/b.MP4")
    assert is_video(Path("clip.webm"))
    assert not is_video("image.gif")
