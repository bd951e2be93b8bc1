"""Tasks of lmms-eval from drawn scenes and photographs: YAML, JSON lines, images and the functions the YAML names."""

import json
from pathlib import Path

from clustrs.evaluation.tasks import Task

FUNCTIONS = """
from PIL import Image

from clustrs.evaluation.tasks import normalize_answer


def visuals(document):
    return [Image.open(path) for path in document["paths"]]


def score(document, results):
    return {"accuracy": float(normalize_answer(results[0]) == normalize_answer(document["answer"]))}


def choice_index(document):
    return document["choices"].index(document["answer"])
"""
SHARED = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{name}.jsonl
test_split: test
doc_to_visual: !function scene_functions.visuals
doc_to_text: question
"""
GENERATE = """
output_type: generate_until
doc_to_target: answer
process_results: !function scene_functions.score
generation_kwargs:
  max_new_tokens: 4
  temperature: 0
  do_sample: false
metric_list:
  - metric: accuracy
    aggregation: mean
    higher_is_better: true
"""
CHOOSE = """
output_type: multiple_choice
doc_to_target: !function scene_functions.choice_index
doc_to_choice: choices
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
CHOICES = ["red", "green", "blue", "yes", "no", "1", "2"]


def write_tasks(folder: Path, scenes: Task, photos: Task) -> None:
    """Write the questions about scenes, each with its image, with its image twice and with choices; and those about
    photographs."""
    folder.mkdir()
    (folder / "scene_functions.py").write_text(FUNCTIONS)
    write_task(folder, "drawn_scenes", GENERATE, scenes)
    write_task(folder, "drawn_pairs", GENERATE, scenes, images=2)
    write_task(folder, "drawn_choices", CHOOSE, scenes)
    write_task(folder, "photos", GENERATE, photos)


def write_task(folder: Path, name: str, kind: str, task: Task, images: int = 1) -> None:
    """Write a task: its questions, each with its image so many times, and the YAML."""
    lines = []
    for item in task.items:
        path = folder / f"{item.image}.png"
        task.open(item.image).save(path)
        choices = list(dict.fromkeys([*CHOICES, item.answer]))
        line = {"question": item.question, "answer": item.answer, "image": item.image, "choices": choices}
        lines.append({**line, "paths": [str(path)] * images})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / f"{name}.yaml").write_text(SHARED.format(name=name, folder=folder) + kind)
