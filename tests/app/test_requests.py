"""Requests to the page's server that no page of its own makes: other sites', wrong, many, broken off, large."""

import json
import socket
import uuid
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from app_tools import need

WAIT = 300
"""Seconds after which a request counts as hanging, on a busy machine, too."""
MEGABYTE = 1_000_000


class Client:
    """Requests to a served page, and the indices of its event handlers by name."""

    def __init__(self, address: str) -> None:
        self.host = urlsplit(address).netloc
        config = json.loads(self.request("GET", "/config")[1])
        self.handlers = {entry["api_name"]: entry["id"] for entry in config["dependencies"]}

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPResponse:
        connection = HTTPConnection(self.host, timeout=WAIT)
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        response = self.open(method, path, body, **headers)
        return response.status, response.read().decode(errors="replace")

    def join(self, handler: str, data: Any, event_data: Any = None) -> tuple[int, str, str]:
        """Queue a call; returns the status, the text, and the session to read the answer from."""
        session = uuid.uuid4().hex
        call = {"fn_index": self.handlers[handler], "data": data, "event_data": event_data, "session_hash": session}
        headers = {"content-type": "application/json"}
        return *self.request("POST", "/gradio_api/queue/join", json.dumps(call), **headers), session

    def events(self, session: str) -> Generator[dict[str, Any], None, None]:
        response = self.open("GET", f"/gradio_api/queue/data?session_hash={session}")
        while line := response.readline():
            if line.startswith(b"data:"):
                yield json.loads(line[5:])

    def call(self, handler: str, data: Any, event_data: Any = None) -> tuple[bool, str]:
        """Whether a call succeeded, and its output or error."""
        status, text, session = self.join(handler, data, event_data)
        if status != 200:
            return False, text
        for event in self.events(session):
            if event["msg"] == "process_completed":
                output = event["output"]
                return event["success"], json.dumps(output) if event["success"] else str(output["error"])
        raise AssertionError("the stream ended without an answer")


@pytest.fixture(scope="module")
def client(served: str) -> Client:
    return Client(served)


def test_own_names_are_served(client: Client) -> None:
    port = client.host.rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert client.request("GET", "/config", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/config", "/gradio_api/file=/etc/passwd", "/gradio_api/upload"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "a@evil.example", ""])
def test_foreign_host_is_refused(client: Client, host: str, path: str) -> None:
    """DNS rebinding: a name of another site that leads to this machine."""
    for method in ("GET", "POST"):
        status, text = client.request(method, path, Host=host)
        assert (status, text) == (403, f"Host must be one of 127.0.0.1, [::1], localhost, got {host!r}")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1.evil.example"]
)
def test_foreign_origin_is_refused(client: Client, origin: str) -> None:
    call = json.dumps({"fn_index": 0, "data": [], "session_hash": "a"})
    status, text = client.request("POST", "/gradio_api/queue/join", call, Origin=origin)
    assert status == 403
    assert text == f"Origin must be this page's, {client.host}, got {origin!r}"


def test_page_on_all_addresses_answers_to_any_name() -> None:
    need("gradio")
    from clustrs.app.server import accepted_hosts

    assert accepted_hosts("0.0.0.0") is accepted_hosts("192.168.1.5") is accepted_hosts("my-server") is None
    assert accepted_hosts("127.0.0.2") == frozenset({"localhost", "127.0.0.1", "[::1]", "127.0.0.2"})
    assert accepted_hosts("::1") == frozenset({"localhost", "127.0.0.1", "[::1]"})


FILE_ROUTES = [
    "/gradio_api/file=",
    "/gradio_api/file/",
    "/file=",
    "/file/",
    "/static/",
    "/assets/",
    "/svelte/",
    "/gradio_api/proxy=",
]


@pytest.mark.parametrize("route", FILE_ROUTES)
def test_no_route_leads_to_other_files(client: Client, route: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    up = "../" * 20
    escaped = up.replace("../", "%2e%2e%2f") + str(secret)[1:].replace("/", "%2f")
    paths = [
        str(secret),
        up + str(secret)[1:],
        escaped,
        f"file://{secret}",
        f"..%00{secret}",
        f"./{up}{str(secret)[1:]}",
    ]
    for path in [*paths, "http://127.0.0.1:9/x", __file__]:
        status, text = client.request("GET", route + path)
        assert status in (400, 403, 404), (path, status)
        assert "a secret" not in text


def test_uploaded_path_must_be_an_upload(client: Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"a secret")
    for path in (str(secret), "/etc/passwd", "../../etc/passwd"):
        success, text = client.call("take_upload", [{"path": path, "meta": {"_type": "gradio.FileData"}}])
        assert not success
        assert "not uploaded by a user" in text


WRONG: list[tuple[str, list[Any], Any]] = [
    ("preview", [None, "gaussian", "abc", 0], None),
    ("preview", [None, {"a": 1}, 1, 0], None),
    ("preview", [None, "gaussian", 1e308, 0], None),
    ("preview", [None, "gaussian", 1, -5], None),
    ("preview", [], None),
    ("change_corruption", ["fog"], None),
    ("choose_sample", [], None),
    ("choose_sample", [], {"index": 10**9, "value": ""}),
    ("choose_sample", [], {"index": "x", "value": ""}),
    ("take_upload", [None], None),
    ("take_upload", ["/etc/passwd"], None),
    ("choose_sample", [], {"index": -1}),
    ("choose_question", [None], {"index": 99}),
    ("answer", [None, "clean", 0.1, 0, "What?", "clustrs", 16, 2], None),
    ("answer", [None, "clean", 0.1, 0, "What?", ["clustrs"], "many", 2], None),
    ("show", [None, "clean", 0.1, 0, "clustrs", 1e18, ""], None),
    ("show", [None, "clean", 0.1, 0, ["x"], 4, ""], None),
    ("show", [None, "clean", 0.1, 0, "clustrs", 4, None], None),
    ("jump", ["hostile", "gaussian", "4"], None),
    ("jump", ["hostile", "gaussian", "4"], {"method": "x", "condition": 0}),
    ("compare", ["hostile", 10**6, 2, 0], None),
    ("compare", ["../hostile", 1, 2, 0], None),
    ("question", ["hostile", 1, 3, 0], {"index": 10**30}),
    ("question", ["hostile", 1, 3, 0], None),
]


def test_wrong_types_give_one_sentence_and_no_traceback(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    for handler, data, event_data in WRONG:
        success, text = client.call(handler, data, event_data)
        assert not success, (handler, data)
        assert text not in ("", "None"), (handler, data)
        assert "\n" not in text, (handler, data)
    for body in ("{", "[]", '{"data": "abc"}', '{"fn_index": 999, "data": [], "session_hash": "a"}', "\0" * 100):
        status, _ = client.request("POST", "/gradio_api/queue/join", body, **{"content-type": "application/json"})
        assert 400 <= status < 500, body
    assert "Traceback" not in "".join(capfd.readouterr())
    assert client.call("change_corruption", ["gaussian"])[0]


def test_fifty_requests_at_once_are_answered_or_told_that_the_queue_is_full(client: Client) -> None:
    with ThreadPoolExecutor(50) as pool:
        outcomes = list(pool.map(lambda seed: client.call("preview", [None, "gaussian", 0.5, seed]), range(50)))
    pictures = [text for success, text in outcomes if success]
    refused = [text for success, text in outcomes if not success]
    assert pictures
    assert all("data:image/webp" in text for text in pictures)
    assert all("queue is full" in text.lower() for text in refused), refused
    assert client.call("preview", [None, "gaussian", 0.5, 0])[0]


def test_visitor_who_leaves_in_the_middle_does_not_hold_the_model(client: Client) -> None:
    *_, session = client.join("answer", [None, "clean", 0.1, 0, "What is in the image?", ["clustrs"], 16, 512])
    events = client.events(session)
    while next(events)["msg"] != "process_generating":
        pass
    events.close()
    success, text = client.call("answer", [None, "clean", 0.1, 0, "What is in the image?", ["clustrs"], 16, 1])
    assert success
    assert "No answer is known" in text


def upload_headers(length: int | None) -> dict[str, str]:
    kind = {"content-type": "multipart/form-data; boundary=x"}
    return kind if length is None else {**kind, "content-length": str(length)}


def file_of(size: int) -> Iterator[bytes]:
    yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    for _ in range(size // MEGABYTE):
        yield bytes(MEGABYTE)
    yield b"\r\n--x--\r\n"


def test_large_upload_is_refused_before_its_body_is_sent(client: Client) -> None:
    host, _, port = client.host.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT) as connection:
        head = [f"POST /gradio_api/upload HTTP/1.1\r\nHost: {client.host}\r\n"]
        head += [f"{name}: {value}\r\n" for name, value in upload_headers(200 * MEGABYTE).items()]
        connection.sendall(("".join(head) + "\r\n").encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("length", [200 * MEGABYTE, None], ids=["with its length", "in chunks"])
def test_upload_of_200_megabytes_is_refused_and_not_stored(client: Client, length: int | None) -> None:
    body = list(file_of(200 * MEGABYTE))
    whole = None if length is None else sum(map(len, body))
    status, text = client.request("POST", "/gradio_api/upload", iter(body), **upload_headers(whole))
    assert status == 413
    assert text.startswith("a request must have at most 21000000 bytes, got ")


def test_small_upload_is_stored_and_served(client: Client) -> None:
    body = b"".join(file_of(MEGABYTE))
    status, text = client.request("POST", "/gradio_api/upload", body, **upload_headers(len(body)))
    assert status == 200
    (path,) = json.loads(text)
    assert client.request("GET", f"/gradio_api/file={path}")[0] == 200
