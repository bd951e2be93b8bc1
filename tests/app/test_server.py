"""Where the page listens, and what it says when it cannot."""

import doctest
import socket
from pathlib import Path

import pytest
from app_tools import need

from clustrs import app


def test_port_that_is_taken_is_named(loaded: object, tmp_path: Path) -> None:
    need("gradio")
    from clustrs.app.server import launch

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on host '127\.0\.0\.1', port {port} \(.*\)"):
            launch(loaded, tmp_path, port=port, browser=False, block=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [0, 70000, -1])
def test_port_that_cannot_be_is_refused(loaded: object, tmp_path: Path, port: int) -> None:
    need("gradio")
    from clustrs.app.server import launch

    with pytest.raises(ValueError, match=f"port must be a number from 1 to 65535, got {port}"):
        launch(loaded, tmp_path, port=port, browser=False, block=False)  # type: ignore[arg-type]


def test_the_snippet_in_the_docs_runs() -> None:
    need("gradio")
    page = Path(__file__).parents[2] / "docs" / "app.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert (result.failed, result.attempted) == (0, 3)


def test_missing_gradio_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"the page needs Gradio, .*: pip install .*'\.\[app\]'"):
        app.launch  # noqa: B018
