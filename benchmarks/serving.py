"""Measure the throughput and latency of a server, with and without pruning.

The same requests go in turn to vLLM's own server and, with several budgets, to a pruned one (`clustrs serve`) on
127.0.0.1: a drawn image each, questions and answers of mixed lengths, 8 and 32 at once. vLLM's caches of prompts and
images are off, so every request pays for its image. A run that takes too long stops sending (--seconds), and its rates
are those of the requests that were answered.

Models: the embedded mini-llava, whose tower is a large part of the work; one with random weights whose language model
costs about 20 times its tower until the first token, as in LLaVA-1.5-7B; and one with random weights, the widths of
LLaVA-OneVision-0.5B and an eighth of its layers. Answers of the latter two mean nothing.

--memory N sends N requests to vLLM's own server and to a pruned one instead, and fails if those after the first 200
add more than 5 per cent to the memory of the latter.
Needs the environment of `make test-vllm`. Writes serving.json, serving.md and serving.png to the output folder, with
what serving.json has of other models; --render writes the last two again from the first. --docs does the same with
docs/results/serving.json, and writes the tables and the plot of docs/serving.md.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks import serving_report
from benchmarks.serving_report import label
from clustrs.embedded import model_folder
from clustrs.models.costs import count_cost
from clustrs.serving.server import server_words
from clustrs_models.scenes import examples

KEEPS: tuple[int | float | None, ...] = (None, 16, 64, 144, 1.0)
"""None: vLLM's own server. 1.0: all tokens, through the plugin."""
CONCURRENCY = (8, 32)
VISUAL_TOKENS = 576
FILLER = ("How", "many", "red", "objects", "are", "there", "?", "Is", "the", "yellow", "circle", "left", "or", "right")
SERVER_OPTIONS = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "32"),
    *("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"),
]
START_SECONDS = 600
Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One question: the image as a data URL, the text, and how many tokens the answer has."""

    image: str
    text: str
    new_tokens: int


@dataclass(frozen=True)
class Timing:
    """When a request's first token and its end came, in seconds after it was sent, and the length of its prompt."""

    first: float
    last: float
    prompt_tokens: int


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """The same requests every time, all with different images."""
    rng = random.Random(seed)
    made = []
    for example in examples(count):
        file = io.BytesIO()
        Image.fromarray(example.drawing.pixels).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        words = " ".join(rng.choices(FILLER, k=rng.randint(8, 80)))
        made.append(Request(url, words, rng.choice((1, 4, 8, 16))))
    return made


def build_proportional(folder: Path) -> None:
    """A LLaVA with random weights whose tower and language model stand to each other as in LLaVA-1.5-7B."""
    import torch
    from transformers import AutoModelForImageTextToText

    from clustrs_models.smol_build import use_published_names

    shutil.copytree(model_folder("mini-llava"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(proportional_config()).save_pretrained(folder)
    use_published_names(folder / "model.safetensors")


def proportional_config() -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder("mini-llava"))
    for name, value in {"hidden_size": 96, "intermediate_size": 384, "num_attention_heads": 3}.items():
        setattr(config.vision_config, name, value)
    config.vision_config.num_hidden_layers = 3
    text = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 12, "num_key_value_heads": 12}
    for name, value in {**text, "num_hidden_layers": 8}.items():
        setattr(config.text_config, name, value)
    return config


def build_onevision(folder: Path) -> None:
    """A LLaVA-OneVision with random weights and the widths of the 0.5B model, with an eighth of its layers."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, SiglipVisionConfig

    from clustrs_models.smol_build import use_published_names

    source = model_folder("mini-onevision")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(source)
    side = config.vision_config.image_size
    shape = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 3}
    config.vision_config = SiglipVisionConfig(**shape, image_size=side, patch_size=config.vision_config.patch_size)
    text = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    text |= {"num_hidden_layers": 3, "max_position_embeddings": 8192}
    for name, value in {**text, "layer_types": ["full_attention"] * 3}.items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    use_published_names(folder / "model.safetensors")


@contextmanager
def server(model: str, keep: int | float | None, log: Path) -> Iterator[str]:
    """A server of its own on a free port, until the block ends; its address."""
    command = list(server_words(model))
    if keep is not None:
        command = ["clustrs.cli", "serve", model, "--keep", str(keep), *ANY_BUDGET * (keep == EVERYTHING)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
    arguments = [*command, *SERVER_OPTIONS, "--served-model-name", "served"]
    if "onevision" in model:  # several crops
        arguments += ["--max-model-len", "4096"]
    with running(arguments, log, environment, START_SECONDS) as (address, _):
        yield address


@contextmanager
def running(
    arguments: list[str], log: Path, environment: dict[str, str], seconds: float
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """`python -m` with arguments, which starts a server, on a free port of this machine until the block ends; its
    address and process, once it answers. What it prints goes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process, log, seconds)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(address: str, process: "subprocess.Popen[bytes]", log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            end = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the server stopped with exit code {process.returncode}, see {log}:\n{end}")
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(
        f"the server was not ready after {seconds} s, see {log}:\n{log.read_text(errors='replace')[-4000:]}"
    )


def read_metrics(address: str) -> dict[str, float]:
    """Return the number of KV-cache blocks of the server, and the share in use."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    blocks = re.search(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', text)
    usage = re.search(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)", text, re.MULTILINE)
    names = ("encoder_steps", "scoring_seconds", "selection_seconds")
    found = {name: re.search(rf"^clustrs:{name}_total (\S+)", text, re.MULTILINE) for name in names}
    ours = {name: float(one[1]) if one else 0.0 for name, one in found.items()}
    return {"blocks": float(blocks[1]) if blocks else 0.0, "usage": float(usage[1]) if usage else 0.0, **ours}


async def ask(client: Any, request: Request, keep: int | None = None) -> Timing:
    """One request as a chat client makes it, streamed."""
    content = [
        {"type": "image_url", "image_url": {"url": request.image}},
        {"type": "text", "text": request.text},
    ]
    budget = {} if keep is None else {"mm_processor_kwargs": {"keep": keep}}
    start, first, prompt = time.perf_counter(), None, 0
    stream = await client.chat.completions.create(
        model="served",
        messages=[{"role": "user", "content": content}],
        max_tokens=request.new_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True, **budget},
    )
    async for chunk in stream:
        if first is None and chunk.choices and getattr(chunk.choices[0], "token_ids", None):
            first = time.perf_counter() - start
        if chunk.usage:
            prompt = chunk.usage.prompt_tokens
    last = time.perf_counter() - start
    return Timing(last if first is None else first, last, prompt)


async def run(
    address: str, requests: list[Request], at_once: int, seconds: float, budgets: Sequence[int | None] = (None,)
) -> Row:
    """Send the requests, `at_once` of them at any time, and watch the KV cache meanwhile."""
    from openai import AsyncOpenAI, OpenAIError

    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=300, max_retries=0)
    left, timings, used, failures = list(reversed(requests)), list[Timing](), list[float](), list[str]()
    before = await asyncio.to_thread(read_metrics, address)
    total = before["blocks"]
    start = time.perf_counter()

    async def worker() -> None:
        while left and time.perf_counter() - start < seconds:
            try:
                keep = budgets[len(left) % len(budgets)]
                timings.append(await ask(client, left.pop(), keep))
            except OpenAIError as error:
                failures.append(str(error))

    async def watch() -> None:
        while True:
            used.append((await asyncio.to_thread(read_metrics, address))["usage"] * total)
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(worker() for _ in range(at_once)))
    elapsed = time.perf_counter() - start
    watching.cancel()
    await client.close()
    after = await asyncio.to_thread(read_metrics, address)
    steps = after["encoder_steps"] - before["encoder_steps"]

    def per_step(name: str) -> float | None:
        return round((after[name] - before[name]) / steps, 5) if steps else None

    if not timings:
        raise RuntimeError(f"no request was answered, {len(failures)} failed: {failures[:1]}")
    firsts = sorted(timing.first for timing in timings)
    return {
        "at_once": at_once,
        "requests": len(timings),
        "failed": len(failures),
        "seconds": round(elapsed, 2),
        "requests_per_second": round(len(timings) / elapsed, 3),
        "first_token_median": round(statistics.median(firsts), 4),
        "first_token_p99": round(firsts[min(len(firsts) - 1, round(0.99 * (len(firsts) - 1)))], 4),
        "prompt_tokens": round(statistics.mean(timing.prompt_tokens for timing in timings), 1),
        "blocks_mean": round(statistics.mean(used), 1),
        "blocks_peak": round(max(used)),
        "encoder_steps": round(steps),
        **{f"{stage}_per_step": per_step(f"{stage}_seconds") for stage in ("scoring", "selection")},
    }


BUILDERS = {"proportional": build_proportional, "onevision-0.5b": build_onevision}
MODELS = ("mini-llava", *BUILDERS)
REQUESTS = {"mini-llava": 96, "proportional": 64, "onevision-0.5b": 16}
"""Per run, unless --requests is given; at least as many as are sent at once."""
EVERYTHING = 10_000
"""A budget that no image has so many tokens for."""
ANY_BUDGET = ("--keep-range", "1", str(EVERYTHING))


def check_memory(options: argparse.Namespace) -> None:
    """Send many requests to vLLM's own server and to a pruned one with four budgets; compare their memory."""
    words = ["clustrs.cli", "serve", str(model_folder("mini-llava")), "--keep", "64", "--keep-range", "16", "256"]
    pruned = memory_used(words, options, "pruned", (16, 64, 144, 256))
    plain = memory_used([*server_words(str(model_folder("mini-llava")))], options, "plain", (None,))
    result = {"pruned": pruned, "plain": plain}
    (options.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    growth = {name: rows[-1]["MB"] / rows[0]["MB"] - 1 for name, rows in result.items()}
    print(f"{options.memory} requests, after the first 200: {growth['pruned']:+.1%}, plain {growth['plain']:+.1%}")
    if growth["pruned"] > 0.05:
        raise SystemExit("more than 5 %")


def memory_used(words: list[str], options: argparse.Namespace, name: str, budgets: Sequence[int | None]) -> list[Row]:
    """The memory of a server's processes after every 200 requests. A page that n of them share counts 1/n in each."""
    import psutil  # type: ignore[import-untyped]

    requests, rows = make_requests(min(options.memory, 200)), list[Row]()
    arguments = [*words, *SERVER_OPTIONS, "--served-model-name", "served"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running(arguments, options.out / f"memory-{name}.log", environment, START_SECONDS) as (address, process):
        for done in range(0, options.memory, len(requests)):
            asyncio.run(run(address, requests, 32, 3600, budgets))
            server = psutil.Process(process.pid)
            each = [(one.name(), one.memory_full_info().pss) for one in (server, *server.children(recursive=True))]
            rows.append({"requests": done + len(requests), "MB": round(sum(used for _, used in each) / 2**20)})
            rows[-1]["processes"] = [(part, round(used / 2**20)) for part, used in each]
            print(f"{name}: {rows[-1]}", flush=True)
    return rows


def measure(options: argparse.Namespace) -> list[Row]:
    """All models, budgets and numbers of requests at once."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            model = str(model_folder(name)) if name == "mini-llava" else str(Path(scratch) / name)
            if name in BUILDERS:
                BUILDERS[name](Path(model))
            requests = make_requests(max(options.requests or REQUESTS[name], *options.at_once))
            logs = [options.out / f"serving-{name}-{kind}.log" for kind in ("plain", "pruned")]
            with server(model, None, logs[0]) as plain, server(model, EVERYTHING, logs[1]) as pruned:
                for address in (plain, pruned):
                    asyncio.run(run(address, requests[:4], 4, options.seconds))  # not counted
                for at_once in options.at_once:
                    sent = requests[: max(options.requests or REQUESTS[name], at_once)]
                    runs: dict[Any, list[Row]] = {keep: [] for keep in options.keep}
                    for keep in options.keep * options.rounds:
                        address, budget = plain if keep is None else pruned, EVERYTHING if keep == 1.0 else keep
                        runs[keep].append(asyncio.run(run(address, sent, at_once, options.seconds, [budget])))
                    for keep, some in runs.items():
                        best = max(some, key=lambda row: row["requests_per_second"])
                        rows.append({"model": name, "keep": keep, "runs": len(some), **best})
                        print(f"{name}, {label(keep)}, {at_once} at once: {rows[-1]}", flush=True)
    return rows


def predictions() -> list[Row]:
    """Return the modeled cost until the first token, for both models and for LLaVA-1.5-7B in half precision."""
    import torch
    from transformers import AutoConfig

    from clustrs.models.shapes import shape_config

    configs = {
        "mini-llava": AutoConfig.from_pretrained(model_folder("mini-llava")),
        "proportional": proportional_config(),
        "LLaVA-1.5-7B": shape_config("llava-1.5-7b"),
    }
    rows = []
    for name, config in configs.items():
        costs = {keep: count_cost(config, 44, keep, dtype=torch.float16) for keep in (VISUAL_TOKENS, 144, 64, 16)}
        whole = costs[VISUAL_TOKENS]
        for keep, cost in costs.items():
            flops = cost.first_token
            rows.append(
                {
                    "model": name,
                    "keep": keep,
                    "gflops": round(flops / 1e9, 2),
                    "tower_share": round((cost.vision + cost.projector) / flops, 3),
                    "flops_ratio": round(flops / whole.first_token, 3),
                    "kv_ratio": round(cost.kv_bytes / whole.kv_bytes, 3),
                }
            )
    return rows


def read_keep(word: str) -> int | float | None:
    return {"plain": None, "all": 1.0}[word] if word in ("plain", "all") else int(word)


def write(result: Row, out: Path) -> None:
    text = serving_report.markdown(result)
    (out / "serving.md").write_text(text)
    serving_report.plot(result, out / "serving.png")
    print(f"\n{text}\nwritten: {out}/serving.md, serving.png")


def run_all(options: argparse.Namespace, file: Path) -> None:
    """Measure, and store the rows in place of those that the file has of the same models and numbers at once."""
    from vllm import __version__ as version

    stored: Row = json.loads(file.read_text()) if file.exists() else {"rows": [], "settings": {}}
    load = round(os.getloadavg()[0], 1)
    own = {"requests": options.requests, "seconds": options.seconds, "rounds": options.rounds, "load before": load}
    runs = {
        f"{name}, {at_once} at once": {**own, "requests": options.requests or REQUESTS[name]}
        for name in options.models
        for at_once in options.at_once
    }
    settings = {"server": SERVER_OPTIONS, "runs": {**stored["settings"].get("runs", {}), **runs}}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "vllm": version}
    measured = {(model, at_once) for model in options.models for at_once in options.at_once}
    others = [row for row in stored["rows"] if (row["model"], row["at_once"]) not in measured]
    order = sorted([*others, *measure(options)], key=lambda row: (MODELS.index(row["model"]), row["at_once"]))
    rows = serving_report.with_ratios(order)
    result = {"machine": machine, "settings": settings, "rows": rows, "predicted": predictions()}
    file.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--keep", nargs="+", type=read_keep, default=list(KEEPS), help="plain, all, or numbers")
    parser.add_argument("--at-once", nargs="+", type=int, default=list(CONCURRENCY), help="default: 8 32")
    parser.add_argument("--requests", type=int, help=f"per server and run (default: {REQUESTS})")
    parser.add_argument("--rounds", type=int, default=2, help="runs, of which the fastest counts (default: 2)")
    parser.add_argument("--seconds", type=float, default=120, help="a run sends no more after this (default: 120)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    parser.add_argument("--memory", type=int, metavar="N", help="check memory over N requests, and nothing else")
    parser.add_argument("--render", action="store_true", help="measure nothing, only write tables and plot again")
    parser.add_argument("--docs", action="store_true", help="store in docs/results, write docs/serving.md and its plot")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.memory:
        check_memory(options)
        return
    file = serving_report.STORED if options.docs else options.out / "serving.json"
    if not options.render:
        run_all(options, file)
    result = json.loads(file.read_text())
    write(result, options.out)
    if options.docs:
        serving_report.write_page(result)


if __name__ == "__main__":
    main()
