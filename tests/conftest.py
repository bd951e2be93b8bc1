import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from judge_server import Reply, Server

# Tests need no network: a model that is not on this machine is missing at once, without attempts to download it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads this when it is first imported: its kernels are interpreted where there is no GPU to run them.
os.environ.setdefault("TRITON_INTERPRET", "1")
# The compiler works in this process: starting others takes longer than what tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The same examples on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", common, derandomize=True, max_examples=80)
settings.register_profile("explore", common, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked gpu where there is no CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that no process is left with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("graphs")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folders of saved tiny models, each built once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(family: str, tower: str) -> Path:
        import tiny_models

        if (family, tower) not in made:
            made[family, tower] = tmp_path_factory.mktemp(f"{family}-{tower}")
            tiny_models.build(family, tower, made[family, tower])
        return made[family, tower]

    return folder


@pytest.fixture(scope="session")
def load(folder_of: Callable[[str, str], Path]) -> Callable[..., tuple[Any, Any]]:
    """A tiny model and its processor, as if freshly loaded."""

    def fresh(family: str = "llava", tower: str = "clip", **options: Any) -> tuple[Any, Any]:
        import tiny_models

        return tiny_models.load(folder_of(family, tower), **options)

    return fresh


@pytest.fixture(scope="session")
def load_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """A tiny model of any family, and its processor, as if freshly loaded; each is built once."""
    made: dict[str, Path] = {}

    def fresh(family: str) -> tuple[Any, Any]:
        import tiny_models

        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tiny_models.BUILDERS[family](made[family])
        return tiny_models.load(made[family])

    return fresh


@pytest.fixture(autouse=True)
def quick_pdfs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of reports are made, but saved as a few bytes: rendering takes longer than the rest of a report. Tests
    marked `figures` get real ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError:  # the environments of vLLM and lmms-eval may be without
        return
    if request.node.get_closest_marker("figures"):
        return
    render = Figure.savefig

    def savefig(figure: Figure, to: Any, **options: Any) -> None:
        if options.get("format") != "pdf":
            render(figure, to, **options)
            return
        assert figure.get_axes()
        to.write(b"%PDF")

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods attach as they were published unless a test says otherwise: what pruning by hand is compared with."""
    from clustrs.pruners.base import Pruner

    defaults = Pruner.attach.__kwdefaults__
    assert defaults is not None
    for name, value in (("positions", "compact"), ("attention", "plain")):
        monkeypatch.setitem(defaults, name, value)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line: what it returns, and what it prints to either stream."""
    from clustrs.cli import main

    def run(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Starts a server that gives the replies it is told to; it is closed at the end of the test."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("clustrs.evaluation.judge.REPLY_PAUSE", 0.005)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.005)
    servers: list[Server] = []

    def start(*script: Reply) -> Server:
        servers.append(Server(*script))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
