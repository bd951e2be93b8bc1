"""Measure smol-llava served by vLLM: plain, with 64 and with 16 visual tokens, 32 requests at once.

    PYTHONPATH=. .venv-vllm/bin/python -m recipes.smol.serving [--keep plain 64 16] [--requests 96]

Every request is a question of photos-sentences with its photograph, answered by four tokens; vLLM's caches of prompts
and images are off. Before that, the first questions are answered at full length, and the right ones counted. Writes
results/serving.json.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.serving import Request, read_keep, run, server
from benchmarks.serving_report import label
from clustrs.embedded import model_folder
from clustrs.evaluation.tasks import get_task
from clustrs_models.smol import NAME

RESULT = Path(__file__).parent / "results" / "serving.json"
NEW_TOKENS, CHECKED = 4, 24


def request(task: Any, item: Any) -> Request:
    file = io.BytesIO()
    task.open(item.image).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return Request(url, item.question, NEW_TOKENS)


def answer(address: str, asked: Request) -> str:
    parts = [{"type": "image_url", "image_url": {"url": asked.image}}, {"type": "text", "text": asked.text}]
    body = {"model": "served", "messages": [{"role": "user", "content": parts}], "max_tokens": 24, "temperature": 0}
    call = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=300) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs="+", type=read_keep, default=[None, 64, 16], help="plain, all, or numbers")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=240, help="a run sends no more after this (default: 240)")
    parser.add_argument("--logs", type=Path, default=Path("out/smol-serving"))
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    task: Any = get_task("photos-sentences", None, options.requests)
    asked = [request(task, item) for item in task.items]
    result: dict[str, Any] = {"cores": os.cpu_count(), "load before": round(os.getloadavg()[0], 1), "rows": []}
    for keep in options.keep:
        with server(str(model_folder(NAME)), keep, options.logs / f"{label(keep)}.log") as address:
            said = [answer(address, one) for one in asked[:CHECKED]]
            right = sum(task.score(item, text) or 0 for item, text in zip(task.items, said, strict=False))
            row = asyncio.run(run(address, asked, options.at_once, options.seconds))
        result["rows"].append({"keep": label(keep), "right": right, "of": CHECKED, **row})
        print(result["rows"][-1], flush=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
