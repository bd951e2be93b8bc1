"""Records the goldens: `python tests/goldens/record.py rivals`, `... video`, `... inside`, `... groups`, `... release`.

rivals.json: what the published rules of the rivals choose, from the slow references (float64, exact sums).
video.json: the same for rivals that look at the frames of a video.
inside.json: the same for methods inside the language model, and for Compose.
groups.json: the same for methods that group tokens, with sums of the tokens they return.
release-0.1.json: what release 0.1 chose. Record it with that release on the path:
`git worktree add /tmp/old d9fbfa2 && PYTHONPATH=/tmp/old/src:tests python tests/goldens/record.py release`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import reference
from goldens.cases import KEEPS, as_tensors, as_video, images, prompts
from reference import inside as rules

from clustrs import get_method

FOLDER = Path(__file__).parent
BEFORE = ("fastervlm", "divprune", "visionzip", "vispruner")  # rivals that release 0.1 had
RIVALS = (*BEFORE, "cdpruner", "mmr", "scope", "holov", "hiprune", "vscan", "prumerge-plus", "downsample")
VIDEO = ("evs", "vidcom2")
INSIDE = ("fastv", "pyramiddrop", "dart")
COMPOSED = {"first": {"name": "clustermeans", "keep": 0.75}, "second": "fastv"}
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "tome": ("tome", {}),
    "clustermeans": ("clustermeans", {}),
    "clustermeans, power 0.5, salience": ("clustermeans", {"power": 0.5, "salience": True, "seed": 3}),
    "denoise": ("denoise", {}),
    "denoise, divprune": ("denoise", {"inner": "divprune", "clip": [0.0, 1.0], "salience": True}),
}
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "clustrs": ("clustrs", {}),
    "clustrs, euclidean, no shrinkage": ("clustrs", {"distance": "euclidean", "shrink": False}),
    "clustrs, huber centroid, salience": ("clustrs", {"centroid": "huber", "salience": True, "tau": 2.0, "seed": 3}),
    **{name: (name, {}) for name in (*BEFORE, "random", "grid")},
}


def rivals() -> dict[str, Any]:
    results: dict[str, Any] = {name: {} for name in RIVALS}
    for title, image in images(40):
        for keep in KEEPS:
            for name in RIVALS:
                result = reference.run(get_method(name, keep=keep), image)
                results[name][f"{title}, k = {keep}"] = {"indices": result.indices}
                if result.labels is not None:
                    results[name][f"{title}, k = {keep}"]["labels"] = result.labels
    return results


def video() -> dict[str, Any]:
    results: dict[str, Any] = {name: {} for name in VIDEO}
    for title, image in images(12):
        for keep in KEEPS:
            for name in VIDEO:
                result = reference.run(get_method(name, keep=keep), as_video(image))
                results[name][f"{title}, k = {keep}"] = {"indices": result.indices}
    return results


def inside() -> dict[str, Any]:
    results: dict[str, Any] = {name: {} for name in (*INSIDE, "compose")}
    first = get_method("compose", keep=1, **COMPOSED).parts()[0]
    for title, prompt, picture in prompts(20):
        queries, keys, hidden, image = prompt.queries, prompt.keys, prompt.hidden, prompt.image
        encoded = reference.run(first, picture).indices
        short = prompt.without([i for i in range(len(image)) if i not in encoded])
        for keep in KEEPS:
            attention, later = (rules.last_attention(one.queries[1], one.keys[1])[one.image] for one in (prompt, short))
            kept = {
                "fastv": rules.fastv(attention, keep),
                "pyramiddrop": rules.pyramiddrop(queries, keys, image, keep, (0.25, 0.5, 0.75)),
                "dart": rules.dart(keys[1], hidden[2], image, prompt.text, keep),
                "compose": [encoded[i] for i in rules.fastv(later, keep)],
            }
            for name, indices in kept.items():
                results[name][f"{title}, k = {keep}"] = {"indices": indices}
    return results


def groups() -> dict[str, Any]:
    results: dict[str, Any] = {label: {} for label in GROUPS}
    for title, image in images(12):
        for keep in KEEPS:
            for label, (name, parameters) in GROUPS.items():
                result = reference.run(get_method(name, keep=keep, **parameters), image)
                stored: dict[str, Any] = {"indices": result.indices, "labels": result.labels}
                stored["sum"] = result.tokens.sum(-1).tolist()[:3]
                if result.alpha is not None:
                    stored["alpha"] = result.alpha[:5]
                results[label][f"{title}, k = {keep}"] = stored
    return results


def release() -> dict[str, Any]:
    results: dict[str, Any] = {title: {} for title in RELEASED}
    for title, image in images(12):
        inputs = as_tensors(image)
        for keep in KEEPS:
            for label, (name, parameters) in RELEASED.items():
                result = get_method(name, keep=keep, **parameters).select(inputs)
                stored = {"indices": result.indices.tolist(), "sum": result.tokens.double().sum(-1).tolist()[:3]}
                if result.alpha is not None:
                    stored["alpha"] = [round(value, 5) for value in result.alpha.tolist()[:5]]
                results[label][f"{title}, k = {keep}"] = stored
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    """One line for each case."""
    blocks = []
    for name, cases in results.items():
        lines = [f"  {json.dumps(case)}: {json.dumps(stored, separators=(',', ':'))}" for case, stored in cases.items()]
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["rivals"]:
        write(FOLDER / "rivals.json", rivals())
    elif sys.argv[1:] == ["video"]:
        write(FOLDER / "video.json", video())
    elif sys.argv[1:] == ["inside"]:
        write(FOLDER / "inside.json", inside())
    elif sys.argv[1:] == ["groups"]:
        write(FOLDER / "groups.json", groups())
    elif sys.argv[1:] == ["release"]:
        write(FOLDER / "release-0.1.json", release())
    else:
        sys.exit(__doc__)
