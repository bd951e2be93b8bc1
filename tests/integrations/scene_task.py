"""A task of lmms-eval from the drawn scenes: YAML, JSON lines, images and the functions that the YAML names."""

import json
from pathlib import Path

from clustrs.evaluation.task import Task

FUNCTIONS = """
from PIL import Image

from clustrs.evaluation.tasks.scenes import said


def visuals(document):
    return [Image.open(path) for path in document["paths"]]


def score(document, results):
    return {"accuracy": float(said(results[0]) == said(document["answer"]))}


def choice_index(document):
    return document["choices"].index(document["answer"])
"""
SHARED = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.jsonl
test_split: test
doc_to_visual: !function scene_functions.visuals
doc_to_text: question
"""
GENERATE = """
task: drawn_scenes
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
task: drawn_choices
output_type: multiple_choice
doc_to_target: !function scene_functions.choice_index
doc_to_choice: choices
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
CHOICES = ["red", "green", "blue", "yes", "no", "1", "2"]


def write_task(folder: Path, task: Task) -> None:
    """Write the questions of a task, each with its image and with its image twice."""
    folder.mkdir()
    (folder / "scene_functions.py").write_text(FUNCTIONS)
    lines, pairs = [], []
    for item in task.items:
        path = folder / f"{item.image}.png"
        task.open(item.image).save(path)
        choices = list(dict.fromkeys([*CHOICES, item.answer]))
        line = {"question": item.question, "answer": item.answer, "image": item.image, "choices": choices}
        lines.append({**line, "paths": [str(path)]})
        pairs.append({**line, "paths": [str(path), str(path)]})
    for name, content in (("questions", lines), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    shared = SHARED.format(folder=folder)
    twice = shared.replace("questions.jsonl", "pairs.jsonl")
    (folder / "drawn_scenes.yaml").write_text(shared + GENERATE)
    (folder / "drawn_choices.yaml").write_text(shared + CHOOSE)
    (folder / "drawn_pairs.yaml").write_text(twice + GENERATE.replace("drawn_scenes", "drawn_pairs"))
