"""A server on this machine that speaks the chat protocol, well or badly, and runs to be judged."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from clustrs.evaluation.judge import Judge

KEY = "sk-Geheim/+123456789"
Reply = Callable[[BaseHTTPRequestHandler], None]


def says(words: object, status: int = 200) -> Reply:
    return sends(completion(words), status)


def completion(words: object) -> str:
    """The body of a chat completion."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": words}}]})


def sends(body: str | bytes, status: int = 200, after: float = 0, **headers: str) -> Reply:
    content = body.encode() if isinstance(body, str) else body

    def reply(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(after)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return reply


def drips(body: str, pause: float = 0.02, headers: bool = True) -> Reply:
    """Send a byte at a time: each comes soon, the whole takes long. `headers`: those at once, the body in drips."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        handler.wfile.write(head.encode() if headers else b"")
        for character in body if headers else head + body:
            time.sleep(pause)
            handler.wfile.write(character.encode())
            handler.wfile.flush()

    return reply


def hangs_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def breaks_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": ')
    handler.close_connection = True


class Server(ThreadingHTTPServer):
    """Gives the scripted replies in turn, then `rule`'s; keeps what it is asked."""

    daemon_threads = True

    def __init__(self, *script: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = list(script)
        self.rule: Callable[[dict[str, Any]], Reply] = lambda body: says("1.0")
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """A client that has gone away is what some tests are about."""

    def table_rows(self) -> Counter[str]:
        """How often each table row was to be completed."""
        return Counter(row_of(body) for _, _, body in self.asked)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            headers = {name.title(): value for name, value in self.headers.items()}
            self.server.asked.append((self.path, headers, body))
            reply = self.server.script.pop(0) if self.server.script else self.server.rule(body)
        reply(self)

    def log_message(self, *_: Any) -> None:
        pass


def row_of(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"].splitlines()[-1])


def judge_at(server: Server, **options: Any) -> Judge:
    return Judge("marker", server.url, KEY, **{"retries": 3, **options})


def answer_record(item: str, words: str | None, **changes: Any) -> dict[str, Any]:
    return {
        "item": item,
        "image": "p.png",
        "kinds": [],
        "question": f"What is {item}?",
        "answer": "a<AND>b",
        "method": {"name": "clustrs", "keep": 16},
        "corruption": "clean",
        "seed": 0,
        "text": words,
        "score": None,
        "error": "broken image" if words is None else None,
        "kept": [],
        "visual_tokens": 16,
        "unpruned_tokens": 576,
        **changes,
    }


def write_answers(folder: Path, records: list[dict[str, Any]], **settings: Any) -> None:
    """Make a folder that of a run whose answers need a judge. `settings` change the configuration."""
    config = {"task": "mmvet", "judged": True, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def verdict_record(item: str, score: float | None, round: int = 0, judge: str = "marker", text: str = "t") -> str:
    error = "failed" if score is None else None
    record = {"item": item, "text": text, "judge": judge, "round": round, "score": score, "error": error}
    return json.dumps(record) + "\n"


def verdict_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]


def marks_by_item(body: dict[str, Any]) -> Reply:
    """v1_0 gets 0.0, v1_1 gets 0.1, and so on."""
    number = int(row_of(body).split("?")[0].rpartition("_")[2])
    return says(f"{number / 10}")
