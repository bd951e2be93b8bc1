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
    return sends(json.dumps({"choices": [{"message": {"role": "assistant", "content": words}}]}), status)


def sends(body: str, status: int = 200, after: float = 0, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(after)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body.encode())))
        handler.end_headers()
        handler.wfile.write(body.encode())

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

    def rows(self) -> Counter[str]:
        """How often each row to be completed was asked for."""
        return Counter(row_of(body) for _, _, body in self.asked)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            reply = self.server.script.pop(0) if self.server.script else self.server.rule(body)
        reply(self)

    def log_message(self, *_: Any) -> None:
        pass


def row_of(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"].splitlines()[-1])


def judge_at(server: Server, **options: Any) -> Judge:
    return Judge("marker", server.url, KEY, **{"backoff": 0.005, "retries": 3, **options})


def answer_row(item: str, words: str | None, **changes: Any) -> dict[str, Any]:
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


def write_answers(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def verdict_row(item: str, score: float | None, round: int = 0, judge: str = "marker", text: str = "t") -> str:
    error = "failed" if score is None else None
    row = {"item": item, "text": text, "judge": judge, "round": round, "score": score, "error": error}
    return json.dumps(row) + "\n"


def verdict_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]


def marks_by_item(body: dict[str, Any]) -> Reply:
    """v1_0 gets 0.0, v1_1 gets 0.1, and so on."""
    number = int(row_of(body).split("?")[0].rpartition("_")[2])
    return says(f"{number / 10}")
