from collections.abc import Callable, Iterator

import pytest
from judge_server import Reply, Server


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Starts a server that gives the replies it is told to; it is closed at the end of the test."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers: list[Server] = []

    def start(*script: Reply) -> Server:
        servers.append(Server(*script))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
