"""`clustrs ask` about a video."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    tiny_models.build("llava", "clip", folder)
    return folder


def test_a_video(run: Run, folder: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    clip = tmp_path / "clip.mp4"
    with av.open(str(clip), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for seed in range(12):
            container.mux(stream.encode(av.VideoFrame.from_image(tiny_models.make_image(64, 64, seed))))
        container.mux(stream.encode())
    words = ("ask", clip, "What is this?", "--model", folder, "--keep", "5", "--frames", "3", "--max-new-tokens", "2")
    for name in ("kept.png", "kept.gif", "kept.mp4"):
        code, out, err = run(*words, "--json", "--show", tmp_path / name)
        assert code == 0, err
        answer = json.loads(out)
        assert [len(answer["kept"]), sum(map(len, answer["kept"])), answer["visual_tokens"]] == [3, 5, 5]
        assert (tmp_path / name).stat().st_size > 500
    with av.open(str(tmp_path / "kept.mp4")) as drawn:
        assert sum(1 for _ in drawn.decode(video=0)) == 3
    code, _, err = run("compare", *words[1:], "--show", tmp_path / "kept.png")
    assert (code, "--show draws images in compare" in err) == (2, True)
    clip.write_bytes(b"nothing")
    code, _, err = run(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert "could not be read" in err
