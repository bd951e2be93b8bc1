"""The Dockerfile and the compose file, which are not built here: rules that linters have, and commands that parse."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from clustrs.cli.base import parse

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, COMPOSE = ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "compose.yaml"


def instructions() -> list[tuple[str, str]]:
    """Return name and arguments of every instruction, with lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    lines = [line.partition(" ") for line in text.splitlines() if line]
    return [(name, rest) for name, _, rest in lines]


def test_the_dockerfile_follows_the_rules() -> None:
    found = instructions()
    given: dict[str, Any] = dict(found)
    assert found[0][0] == "FROM"
    assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", given["FROM"])  # no tag that moves
    assert given["USER"] not in ("root", "0")
    for name in ("ENTRYPOINT", "CMD"):  # the form without a shell, so that signals reach the server
        assert all(isinstance(word, str) for word in json.loads(given[name]))
    assert given["HEALTHCHECK"].partition("CMD ")[2].startswith("[")
    assert all("--no-cache-dir" in rest for name, rest in found if name == "RUN" and "pip install" in rest)
    sources = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert sources
    assert all((ROOT / source).exists() for source in sources)


def test_the_commands_parse() -> None:
    given = dict(instructions())
    words = [*json.loads(given["ENTRYPOINT"]), *json.loads(given["CMD"])]
    assert words[0] == "clustrs"
    assert parse(words[1:])["keep"] == 64
    service = yaml.safe_load(COMPOSE.read_text())["services"]["vllm"]
    assert parse(["serve", *service["command"]])["keep_range"] == (16, 256)
    assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
