"""The `lmms-eval` command with a task of our own: what it scores is what `clustrs eval` scores."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from integrations.scene_task import write_tasks

from clustrs import Config, __version__, run
from clustrs.cli import main
from clustrs.evaluation.config import expand_methods
from clustrs.evaluation.store import read_answers
from clustrs.evaluation.tasks import Task, get_task
from clustrs.models.ask import chat_prompt
from clustrs.models.load import load_model
from clustrs.pruners import from_dict, get_method
from clustrs_lmms import results
from clustrs_lmms.engine import continued, read_arguments

pytest.importorskip("lmms_eval")
pytestmark = pytest.mark.slow

QUESTIONS, SEED, NOISE = 24, 3, "gaussian:0.5"
FEW = 8
OTHERS = {"mini-onevision": ("scenes", "drawn_scenes"), "photo-llava": ("photos", "photos")}
"""The other embedded models: their tasks of `clustrs eval` and of lmms-eval."""
METHODS = {
    "unpruned": "method=none",
    "clustrs": "method=clustrs,keep=16",
    "tau": "method=clustrs tau=2 shrink=false,keep=0.25",
    "divprune": "method=divprune,keep=16",
    "visionzip": "method=visionzip,keep=16",
}
"""As model_args, by a name for the folder."""
SPECS = {
    "unpruned": "none",
    "clustrs": "clustrs keep=16",
    "tau": "clustrs tau=2 shrink=false keep=0.25",
    "divprune": "divprune keep=16",
    "visionzip": "visionzip keep=16",
}
"""The same as `clustrs eval --methods` has it."""


def evaluation(name: str, arguments: str, out: Path, model: str = "mini-llava", **more: Any) -> dict[str, Any]:
    """An entry of a file for `lmms-eval --config`."""
    return {
        "model": "clustrs",
        "model_args": f"pretrained={model},image_id=image,seed={SEED},{arguments}",
        "tasks": "drawn_scenes",
        "batch_size": "8",
        "log_samples": True,
        "output_path": str(out / name),
        **more,
    }


def evaluations(out: Path) -> list[dict[str, Any]]:
    """All that the command is asked to do, in one process: each start of it takes a while."""
    grid = [
        evaluation(f"grid/{name}-{corrupt.partition(':')[0]}", f"{method},corrupt={corrupt}", out)
        for name, method in METHODS.items()
        for corrupt in ("clean", NOISE)
    ]
    clustrs = METHODS["clustrs"]
    others = [
        evaluation(f"{model}/{corrupt}", f"{clustrs},corrupt={corrupt}", out, model, tasks=task, limit=FEW)
        for model, (_, task) in OTHERS.items()
        for corrupt in ("clean", NOISE)
    ]
    return [
        *grid,
        *others,
        evaluation("one", f"{clustrs},corrupt={NOISE}", out, batch_size="1"),
        evaluation("simple", f"{clustrs},corrupt={NOISE}", out, force_simple=True),
        evaluation("pairs", clustrs, out, tasks="drawn_pairs"),
        evaluation("choices", clustrs, out, tasks="drawn_choices", force_simple=True, limit=6),
        evaluation("choices-one", clustrs, out, tasks="drawn_choices", force_simple=True, limit=6, batch_size="1"),
        evaluation("unknown", "method=clustr,keep=16", out),
        evaluation("misspelt", f"{clustrs},tua=2", out),
        evaluation("unlogged/clean", clustrs, out, log_samples=False),
        evaluation("unlogged/noise", f"{clustrs},corrupt={NOISE}", out, log_samples=False),
    ]


@dataclass(frozen=True)
class Done:
    """What the command wrote and printed, and the task."""

    out: Path
    printed: str
    task: Task

    def content(self, name: str) -> dict[str, Any]:
        """The result file of an evaluation."""
        (path,) = (self.out / name).rglob("*_results.json")
        return dict(json.loads(path.read_text()))

    def samples(self, name: str) -> list[dict[str, Any]]:
        """The logged samples of an evaluation, in the order of the questions."""
        (path,) = (self.out / name).rglob("*_samples_*.jsonl")
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(found, key=lambda sample: int(sample["doc_id"]))

    def texts(self, name: str) -> list[str]:
        """The answers of an evaluation."""
        return [sample["filtered_resps"] for sample in self.samples(name)]


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("lmms")
    task = get_task("scenes", None, QUESTIONS)
    write_tasks(folder / "tasks", task, get_task("photos", None, FEW))
    listed = folder / "evaluations.yaml"
    listed.write_text(yaml.safe_dump(evaluations(folder / "out")))
    command = [str(Path(sys.executable).with_name("lmms-eval")), "--config", str(listed)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    called = subprocess.run(
        [*command, "--include_path", str(folder / "tasks")],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert called.returncode == 0, called.stdout + called.stderr
    return Done(folder / "out", re.sub(r"\x1b\[[0-9;]*m", "", called.stdout + called.stderr), task)


Expected = dict[tuple[str, str], list[tuple[str, str | None, Any]]]
"""What `clustrs eval` says: question, answer and score, by method and corruption."""


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return evaluate("mini-llava", "scenes", SPECS, QUESTIONS, tmp_path_factory.mktemp("run"))


def evaluate(model: str, task: str, specs: dict[str, str], limit: int, folder: Path) -> Expected:
    """Run `clustrs eval` with some methods, clean and under noise."""
    methods = expand_methods(list(specs.values()), [16])
    corruptions = ("clean", NOISE)
    config = Config(
        task=task,
        model=model,
        methods=methods,
        corruptions=corruptions,
        seeds=(SEED,),
        limit=limit,
        device="cpu",
    )
    run(config, folder, progress=False)
    answers: Expected = {}
    names = {json.dumps(method): name for name, method in zip(specs, methods, strict=True)}
    order = [item.id for item in get_task(task, None, limit).items]
    for record in sorted(read_answers(folder), key=lambda record: order.index(record.item)):
        key = names[json.dumps(record.method)], record.corruption
        answers.setdefault(key, []).append((record.question, record.text, record.score))
    return answers


@pytest.mark.parametrize("corrupt", ["clean", NOISE])
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_clustrs_eval(done: Done, expected: Any, method: str, corrupt: str) -> None:
    name = f"grid/{method}-{corrupt.partition(':')[0]}"
    told = [(sample["input"], sample["filtered_resps"], sample["accuracy"]) for sample in done.samples(name)]
    assert told == expected[method, corrupt]
    score = done.content(name)["results"]["drawn_scenes"]["accuracy,none"]
    assert score == pytest.approx(sum(score for *_, score in expected[method, corrupt]) / QUESTIONS)


@pytest.mark.parametrize("model", OTHERS)
def test_scores_of_other_models(done: Done, model: str, tmp_path: Path) -> None:
    task, _ = OTHERS[model]
    wanted = evaluate(model, task, {"clustrs": SPECS["clustrs"]}, FEW, tmp_path)
    for corrupt in ("clean", NOISE):
        samples = done.samples(f"{model}/{corrupt}")
        told = [(sample["input"], sample["filtered_resps"], sample["accuracy"]) for sample in samples]
        assert told == wanted["clustrs", corrupt]
    assert wanted["clustrs", "clean"] != wanted["clustrs", NOISE]


def test_questions_tell_methods_and_corruptions_apart(expected: Any) -> None:
    """Otherwise the test above could not fail."""
    assert len({str(answers) for answers in expected.values()}) > len(METHODS)


def test_batches_change_no_answer(done: Done) -> None:
    assert done.texts("one") == done.texts("grid/clustrs-gaussian")


def test_both_forms_of_a_task_get_the_same_answers(done: Done) -> None:
    assert done.texts("simple") == done.texts("grid/clustrs-gaussian")
    backend = done.content("simple")["config"]["model_backend"]
    assert backend == "clustrs_lmms.model.SimpleModel (simple)"


def test_settings_are_recorded(done: Done) -> None:
    (record,) = done.content("grid/tau-gaussian")["config"]["batch_sizes"]
    assert record["clustrs"] == __version__
    assert from_dict(record["method"]) == get_method("clustrs", keep=0.25, tau=2, shrink=False)
    assert (record["corrupt"], record["seed"], record["image_id"]) == (NOISE, SEED, "image")
    assert (record["torch"], record["lmms_eval"]) == (torch.__version__, version("lmms_eval"))
    counts = record["tasks"]["drawn_scenes"]
    assert counts["questions"] == QUESTIONS
    assert counts["visual_tokens"] == round(0.25 * counts["unpruned_tokens"])


def test_tokens_of_a_sample_are_those_after_pruning(done: Done) -> None:
    pruned, whole = (done.samples(f"grid/{name}-clean")[0]["token_counts"][0] for name in ("clustrs", "unpruned"))
    (record,) = done.content("grid/clustrs-clean")["config"]["batch_sizes"]
    unpruned = record["tasks"]["drawn_scenes"]["unpruned_tokens"]
    assert whole["input_tokens"] - pruned["input_tokens"] == unpruned - 16
    assert 1 <= pruned["output_tokens"] <= 4


def test_several_images(done: Done) -> None:
    (record,) = done.content("pairs")["config"]["batch_sizes"]
    assert record["tasks"]["drawn_pairs"]["visual_tokens"] == 2 * 16
    model, processor = load_model("mini-llava")
    item, image = done.task.items[0], done.task.open(done.task.items[0].image)
    prompt = chat_prompt(processor, item.question)
    assert prompt.count("<image>\n") == 1
    twice = prompt.replace("<image>\n", "<image>\n<image>\n")
    inputs = processor(images=[image, image], text=[twice], return_tensors="pt")
    with get_method("clustrs", keep=16)(model), torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert done.texts("pairs")[0] == answer


def test_likelihoods_are_those_of_a_plain_forward_pass(done: Done) -> None:
    """One continuation at a time, with labels: the loss is the model's own."""
    model, processor = load_model("mini-llava")
    logged = done.samples("choices")
    alone = done.samples("choices-one")
    for item, sample, single in zip(done.task.items, logged, alone, strict=False):
        image, prompt = done.task.open(item.image), chat_prompt(processor, item.question)
        choices = list(dict.fromkeys(["red", "green", "blue", "yes", "no", "1", "2", item.answer]))
        losses = []
        for choice, told, other in zip(choices, sample["filtered_resps"], single["filtered_resps"], strict=True):
            loss, greedy = plain_loss(model, processor, image, prompt, choice)
            losses.append(loss)
            for value, is_greedy in (told, other):
                assert float(value) == pytest.approx(loss, rel=1e-4, abs=1e-5)
                assert is_greedy == str(greedy)
        assert sample["acc"] == float(choices[losses.index(min(losses))] == item.answer)


def plain_loss(model: Any, processor: Any, image: Any, prompt: str, choice: str) -> tuple[float, bool]:
    """The model's own loss on a continuation, and whether it generates its tokens."""
    inputs = processor(images=[image], text=[continued(prompt, choice)], return_tensors="pt")
    before = processor(images=[image], text=[prompt], return_tensors="pt")
    start = before["input_ids"].shape[1]
    labels = inputs["input_ids"].clone()
    labels[:, :start] = -100
    new = labels[0, start:]
    with get_method("clustrs", keep=16)(model), torch.inference_mode():
        loss = float(model(**inputs, labels=labels).loss)
        output = model.generate(**before, max_new_tokens=len(new), do_sample=False)
    return loss, output[0, start:].tolist() == new.tolist()


def test_what_is_wrong_is_said(done: Done) -> None:
    assert not list((done.out / "unknown").rglob("*.json"))
    assert not list((done.out / "misspelt").rglob("*.json"))
    assert "Error during evaluation: unknown method 'clustr' (did you mean 'clustrs'?)" in done.printed
    assert "Error during evaluation: unknown argument tua=2 (did you mean 'tau'?) (accepted:" in done.printed


def test_report_reads_the_results(done: Done, expected: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(done.out / "grid")]) == 0
    printed = capsys.readouterr().out
    (folder,) = (done.out / "grid" / results.RUNS).iterdir()
    assert folder.name == "mini-llava-drawn_scenes"
    means = (folder / "report.csv").read_text()
    for (_, corrupt), answers in expected.items():
        score = 100 * sum(score for *_, score in answers) / QUESTIONS
        assert f"{score:.1f}" in printed
        assert corrupt.partition(":")[0] in means
    page = (folder / "report.md").read_text()
    assert "Retention" in page
    assert "with the 95 % interval of a bootstrap over questions" in page
    assert "Overlap" not in page


def test_report_without_samples_has_totals_only(done: Done, expected: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(done.out / "unlogged")]) == 0
    told = capsys.readouterr()
    assert "only totals are shown" in told.err
    for corrupt in ("clean", NOISE):
        score = 100 * sum(score for *_, score in expected["clustrs", corrupt]) / QUESTIONS
        assert f"{score:.1f}" in told.out
    page = next((done.out / "unlogged" / results.RUNS).iterdir()) / "report.md"
    assert f"{QUESTIONS} questions" in page.read_text()
    assert "Only totals are known" in page.read_text()
    assert "Flip rate" not in page.read_text()


def test_the_model_is_listed() -> None:
    from lmms_eval.models import get_model, list_available_models

    assert "clustrs" in list_available_models()
    assert get_model("clustrs").__name__ == "ChatModel"
    assert get_model("clustrs", force_simple=True).__name__ == "SimpleModel"


def test_arguments_arrive_as_lmms_eval_splits_them() -> None:
    from lmms_eval.utils import simple_parse_args_string

    given = "pretrained=a/b,method=clustrs,keep=0.25,clip=[0.2,0.9],shrink=false,tau=2,corrupt=jpeg:30,dtype=bfloat16"
    arguments = read_arguments(simple_parse_args_string(given))
    assert arguments.method == get_method("clustrs", keep=0.25, clip=(0.2, 0.9), shrink=False, tau=2)
    assert str(arguments.corrupt) == "jpeg:30"
    assert arguments.dtype == "bfloat16"
