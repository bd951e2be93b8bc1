"""`clustrs serve` as clients see it: one server for all tests, asked with the official openai client."""

import asyncio
import base64
import io
import os
import re
import struct
import subprocess
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import openai
import psutil  # type: ignore[import-untyped]
from vllm_engine import Reference

from benchmarks.serving import running
from clustrs import ClustRS
from clustrs.corruptions.images import open_image
from clustrs.embedded import model_folder, samples
from clustrs.serving import embeddings

pytestmark = pytest.mark.slow
KEEP = 16
SCENES = samples("scenes")
QUESTIONS = [(scene, text) for scene in SCENES for text, _ in scene.questions][:32]
OPTIONS = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32"),
    *("--enable-mm-embeds", "--limit-mm-per-prompt", '{"image": 2}'),
]
START_SECONDS = 900
NOT_BLAMED = ("huge", "missing", "unreachable", "empty embeddings")
"""Images for which vLLM answers 500 instead of 400. It fails at loading them, before any model is involved."""


class Server:
    """A running server: its address, what it has printed, and its process."""

    def __init__(self, address: str, log: Path, process: "subprocess.Popen[bytes]") -> None:
        self.address, self.log, self.process = address, log, process

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        pattern = re.escape(name) if "{" in name else rf"{name}(?:\{{[^}}]*\}})?"
        found = re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    async def ask(self, client: openai.AsyncOpenAI, text: str, parts: Sequence[dict[str, Any]], **more: Any) -> Any:
        return await client.chat.completions.create(
            model="mini-llava",
            messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],  # type: ignore[misc, list-item]
            max_tokens=8,
            temperature=0,
            extra_body={"add_special_tokens": True, **more},
        )

    def ask_all(self, requests: Sequence[Sequence[Any]]) -> list[Any]:
        """All at once: text, parts of the message, and if it has one the budget. What failed is an exception."""

        async def gather() -> list[Any]:
            address = f"{self.address}/v1"
            async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=300, max_retries=0) as client:
                asked = [
                    self.ask(client, text, parts, mm_processor_kwargs={"keep": budget[0]} if budget else None)
                    for text, parts, *budget in requests
                ]
                return await asyncio.gather(*asked, return_exceptions=True)

        return asyncio.run(gather())


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def server(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    words = [
        "serve",
        "mini-llava",
        "--keep",
        str(KEEP),
        "--keep-range",
        "4",
        "300",
        *OPTIONS,
        "--allowed-local-media-path",
        str(media),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with running(["clustrs.cli", *words], log, environment, START_SECONDS) as (address, process):
        yield Server(address, log, process)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(model_folder("mini-llava"))


def image_part(path: Path) -> dict[str, Any]:
    return url_part(path.read_bytes())


def url_part(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def texts(replies: Sequence[Any]) -> list[str]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return [reply.choices[0].message.content.strip() for reply in replies]


def expected(
    reference: Reference, text: str, paths: Sequence[Path], keep: int = KEEP, positions: str = "original"
) -> str:
    answer = reference.ask(text, [open_image(path) for path in paths], ClustRS(keep=keep), positions).answer
    ids = list(answer)[: answer.index(2)] if 2 in answer else list(answer)
    return str(reference.processor.decode(ids, skip_special_tokens=True)).strip()


def huge_image() -> bytes:
    """A valid PNG of 400 million white pixels in 50 kB: it would need 1.2 GB as RGB."""
    side = 20_000
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    lines = zlib.compress((b"\0" + b"\xff" * (side // 8)) * side, 9)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def test_one_line_says_what_is_pruned_to_what(server: Server) -> None:
    first = server.log.read_text().splitlines()[0]
    assert first.startswith("clustrs: mini-llava with ClustRS(keep=16, ")
    shown = "): 576 -> 16 visual tokens per image, 4 to 300 by request, original positions, in a pruned class of vLLM's"
    assert first.endswith(shown)
    assert any(line.startswith("clustrs: ready: ClustRS(keep=16, ") for line in server.log.read_text().splitlines())


def test_32_requests_at_once(server: Server, reference: Reference) -> None:
    before = {name: server.metric(f"clustrs:visual_tokens_{name}_total") for name in ("before", "after")}
    replies = server.ask_all([(text, [image_part(scene.path)]) for scene, text in QUESTIONS])
    assert len(replies) == 32
    assert texts(replies) == [expected(reference, text, [scene.path]) for scene, text in QUESTIONS]
    alone = [reference.ask(text, [open_image(scene.path)], ClustRS(keep=KEEP)) for scene, text in QUESTIONS]
    assert [reply.usage.prompt_tokens for reply in replies] == [one.prompt for one in alone]
    assert server.metric("clustrs:visual_tokens_before_total") - before["before"] == 32 * 576
    assert server.metric("clustrs:visual_tokens_after_total") - before["after"] == 32 * KEEP


def test_budgets_of_requests_in_one_batch(server: Server, reference: Reference) -> None:
    """32 at once, with four budgets and the server's own: placeholders, answers and metrics follow."""
    keeps = [4, 64, 300, 16]
    names = [f'clustrs:requests_total{{keep="{keep}"}}' for keep in keeps]
    steps = ("clustrs:encoder_steps_total", "clustrs:selection_seconds_total", "clustrs:scoring_seconds_total")
    before, earlier = [server.metric(name) for name in names], [server.metric(name) for name in steps]
    asked = [(text, [image_part(scene.path)], keeps[i % 4]) for i, (scene, text) in enumerate(QUESTIONS)]
    replies = server.ask_all([request[:2] if request[2] == KEEP else request for request in asked])
    alone = [
        reference.ask(text, [open_image(scene.path)], ClustRS(keep=keep))
        for (scene, text), (_, _, keep) in zip(QUESTIONS, asked, strict=True)
    ]
    assert [reply.usage.prompt_tokens for reply in replies] == [one.prompt for one in alone]
    right = [
        expected(reference, text, [scene.path], keep)
        for (scene, text), (_, _, keep) in zip(QUESTIONS, asked, strict=True)
    ]
    assert texts(replies) == right
    assert [server.metric(name) - count for name, count in zip(names, before, strict=True)] == [8, 8, 8, 8]
    assert all(server.metric(name) > count for name, count in zip(steps, earlier, strict=True))


def test_wrong_budgets_fail_alone(server: Server, reference: Reference) -> None:
    scene, text = QUESTIONS[0]
    bad = [0, 3, 301, -1, 10**30, 16.0, 0.5, True, "16", None, [16], {"a": 1}, "x" * 10_000]
    good = (text, [image_part(scene.path)], 64)
    replies = server.ask_all([good, *[(*good[:2], keep) for keep in bad], good])
    assert [getattr(reply, "status_code", reply) for reply in replies[1:-1]] == [400] * len(bad)
    assert all("keep must be a count from 4 to 300, got" in str(reply) for reply in replies[1:-1])
    assert texts([replies[0], replies[-1]]) == [expected(reference, text, [scene.path], 64)] * 2


def test_other_processor_options_are_not_trusted(server: Server) -> None:
    """As without the plugin: `keep` alone passes."""
    scene, text = QUESTIONS[0]

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            options = {"mm_processor_kwargs": {"keep": 16, "do_resize": False}}
            return await server.ask(client, text, [image_part(scene.path)], **options)

    with pytest.raises(openai.BadRequestError, match="mm_processor_kwargs are disabled by default"):
        asyncio.run(ask())


def test_bad_images_fail_alone(server: Server, media: Path, reference: Reference) -> None:
    whole = SCENES[0].path.read_bytes()
    bad = {
        "no image": url_part(b"this is no image"),
        "cut off": url_part(whole[: len(whole) // 2]),
        "huge": url_part(huge_image()),
        "missing": {"type": "image_url", "image_url": {"url": (media / "missing.png").as_uri()}},
        "unreachable": {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/image.png"}},
        "not base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
        "empty embeddings": {"type": "image_embeds", "image_embeds": base64.b64encode(b"junk").decode()},
    }
    good = [(text, [image_part(scene.path)]) for scene, text in QUESTIONS[:4]]
    requests = [*good[:2], *[("What is this?", [part]) for part in bad.values()], *good[2:]]
    replies = server.ask_all(requests)
    failed = dict(zip(bad, replies[2 : 2 + len(bad)], strict=True))
    codes = {name: getattr(reply, "status_code", reply) for name, reply in failed.items()}
    assert codes == {name: 500 if name in NOT_BLAMED else 400 for name in bad}
    right = [expected(reference, text, [scene.path]) for scene, text in QUESTIONS[:4]]
    assert texts([*replies[:2], *replies[-2:]]) == right
    assert texts(server.ask_all(good)) == right
    assert server.process.poll() is None


def test_the_same_image_twice_hits_the_caches(server: Server) -> None:
    drawn = io.BytesIO()
    open_image(SCENES[1].path).rotate(90).save(drawn, "PNG")
    text = " ".join(["How many objects are there?"] * 30)  # longer than a block of the cache, 128 tokens on a CPU
    request = (text, [url_part(drawn.getvalue())])
    names = ("vllm:mm_cache_hits_total", "vllm:prefix_cache_hits_total")
    (first,) = server.ask_all([request])
    before = [server.metric(name) for name in names]
    (second,) = server.ask_all([request])
    assert texts([first]) == texts([second])
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert all(server.metric(name) > value for name, value in zip(names, before, strict=True))


def test_two_images_in_one_message(server: Server, reference: Reference) -> None:
    text, paths = "How many objects are there?", [SCENES[0].path, SCENES[3].path]
    (reply,) = server.ask_all([(text, [image_part(path) for path in paths])])
    assert texts([reply]) == [expected(reference, text, paths)]


def test_embeddings_from_another_machine(server: Server, reference: Reference, tmp_path: Path) -> None:
    scene, text = QUESTIONS[0]
    image = open_image(scene.path)
    for keep, dtype in [(KEEP, "float32"), (50, "float16")]:
        encoded, before = embeddings.encode_image(reference.model, reference.processor, image, ClustRS(keep=keep))
        embeddings.save_embeddings(tmp_path / "image.safetensors", encoded, dtype, tokens_before=before)
        (reply,) = server.ask_all([(text, [embeddings.message_part(tmp_path / "image.safetensors")])])
        assert texts([reply]) == [expected(reference, text, [scene.path], keep, "compact")]


def test_hostile_images_and_budgets_at_32_clients(server: Server, reference: Reference) -> None:
    scene, text = QUESTIONS[0]
    part, junk = image_part(scene.path), url_part(b"this is no image")
    kinds: list[tuple[Any, ...]] = [
        (text, [part]),
        (text, [junk]),
        (text, [part], -1),
        (text, [junk], "x"),
        (text, [part], 64),
    ]
    replies = server.ask_all([kinds[i % len(kinds)] for i in range(32)])
    codes = [getattr(reply, "status_code", 200) for reply in replies]
    assert codes == [(200, 400, 400, 400, 200)[i % 5] for i in range(32)]
    right = {0: expected(reference, text, [scene.path]), 4: expected(reference, text, [scene.path], 64)}
    assert texts([one for one in replies if not isinstance(one, Exception)]) == [
        right[i % 5] for i in range(32) if i % 5 in right
    ]


def test_cancelled_requests_leave_nothing(server: Server, reference: Reference) -> None:
    """Clients go away while their images are encoded: all requests end, and the KV cache is empty again."""
    scene, text = QUESTIONS[0]

    async def cancel() -> None:
        address = f"{server.address}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            drawn = [rotated(scene.path, 7 * i + 3) for i in range(32)]
            asked = [asyncio.create_task(server.ask(client, text, [part])) for part in drawn]
            await asyncio.sleep(0.2)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(cancel())
    deadline = time.monotonic() + 120
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(server.metric(name) for name in gauges) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert [server.metric(name) for name in gauges] == [0, 0, 0]
    assert texts(server.ask_all([(text, [image_part(scene.path)])])) == [expected(reference, text, [scene.path])]


def rotated(path: Path, angle: int) -> dict[str, Any]:
    drawn = io.BytesIO()
    open_image(path).rotate(angle).save(drawn, "PNG")
    return url_part(drawn.getvalue())


def test_a_killed_worker_ends_the_server(server: Server) -> None:
    """As vLLM's own: requests get an error, and the process ends by itself, with exit code 0. Its folder of metrics is
    gone then. The last test: nothing is served after."""
    (folder,) = Path(tempfile.gettempdir()).glob(f"clustrs-metrics-{server.process.pid}-*")
    worker = [one for one in psutil.Process(server.process.pid).children(recursive=True) if "EngineCore" in one.name()]
    assert len(worker) == 1
    scene, text = QUESTIONS[0]
    worker[0].kill()
    (reply,) = server.ask_all([(text, [rotated(scene.path, 45)])])
    assert isinstance(reply, openai.APIError)
    assert server.process.wait(120) == 0
    assert not folder.exists()
