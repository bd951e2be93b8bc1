"""Overhead: a clock of our own says how long each part takes, and the table has to say the same."""

import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from paper.study_command import parts
from transformers import PreTrainedModel

from clustrs import ClustRS, FasterVLM, NoPruning
from clustrs.corruptions.images import open_image
from clustrs.models import scoring, select
from clustrs.models.ask import chat_prompt
from clustrs.models.load import load_model
from clustrs_paper.studies import StudyPart, overhead
from clustrs_paper.studies.overhead import Contestant, Timing

Folders = Callable[[str, str], Path]
SCORING, PER_KEPT, PER_POSITION = 0.25, 0.01, 0.125
REPEATS = 3


class Clock:
    """Time that passes only in the parts that are watched; the tower takes longer with every call."""

    def __init__(self) -> None:
        self.time = 0.0
        self.towers: list[float] = []
        self.chosen: list[tuple[str, Any]] = []

    def pass_tower(self, *_: Any) -> None:
        self.towers.append(7.0 + len(self.towers) ** 2)
        self.time += self.towers[-1]

    def pass_language(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.time += PER_POSITION * kwargs["inputs_embeds"].shape[1]


def run(folder: Path, *words: Any) -> StudyPart:
    (result,) = parts(overhead, folder, *words)
    return result


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    original_load, original_select, original_scores = load_model, select.select_tokens, scoring.attention_scores

    def load(*given: Any) -> tuple[PreTrainedModel, Any]:
        model, processor = original_load(*given)
        model.model.vision_tower.register_forward_hook(clock.pass_tower)
        model.model.language_model.register_forward_hook(clock.pass_language, with_kwargs=True)
        return model, processor

    def select_tokens(method: Any, *args: Any, **options: Any) -> Any:
        clock.chosen.append((method.name, method.keep))
        clock.time += PER_KEPT * method.keep
        return original_select(method, *args, **options)

    def attention_scores(*args: Any) -> Any:
        clock.time += SCORING
        return original_scores(*args)

    monkeypatch.setattr(scoring, "perf_counter", lambda: clock.time)
    monkeypatch.setattr("clustrs.models.load.load_model", load)
    monkeypatch.setattr(select, "select_tokens", select_tokens)
    monkeypatch.setattr(scoring, "attention_scores", attention_scores)
    return clock


def test_every_part_by_the_clock(folder_of: Folders, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    tiny_models.make_image(40, 40).save(path)
    folder = folder_of("llava", "clip")
    words = ("--methods", "none,clustrs,fastervlm", "--keep", "4,8", "--new-tokens", "2,5", "--repeats", REPEATS)
    result = run(folder, path, *words)

    names = [("none", 1.0), ("clustrs", 4), ("clustrs", 8), ("fastervlm", 4), ("fastervlm", 8)]
    rounds = [clock.chosen[i : i + 5] for i in range(0, len(clock.chosen), 5)]
    assert len(rounds) == REPEATS + 1
    assert all(sorted(one) == sorted(names) for one in rounds)
    assert len({one[0] for one in rounds}) == REPEATS + 1  # each round begins with another method

    processor = load_model(str(folder))[1]
    text = chat_prompt(processor, overhead.QUESTION)
    inputs = processor(images=[open_image(path)], text=[text], return_tensors="pt")
    around = inputs["input_ids"].shape[1] - 16
    assert len(result.rows) == len(names)
    for row, name in zip(result.rows, names, strict=True):
        assert (row["method"], row["keep"]) == (name[0], "all" if name[0] == "none" else name[1])
        places = [i for i, chosen in enumerate(clock.chosen) if chosen == name][1:]  # the first round warms up
        tower = statistics.median(clock.towers[i] for i in places)
        scoring, selection = (0.0, 0.0) if name[0] == "none" else (SCORING, PER_KEPT * name[1])
        visual = tower + scoring + selection
        positions = around + (16 if name[0] == "none" else name[1])
        assert row["runs"] == REPEATS
        assert row["vision_ms"] == pytest.approx(1e3 * tower)
        assert row["scoring_ms"] == pytest.approx(1e3 * scoring)
        assert row["selection_ms"] == pytest.approx(1e3 * selection)
        assert row["overhead_ms"] == pytest.approx(1e3 * visual)
        first = visual + PER_POSITION * positions
        assert row["first_token_ms"] == pytest.approx(1e3 * first)
        for tokens in (2, 5):
            whole = first + PER_POSITION * (tokens - 1)
            assert row[f"answer_{tokens}_ms"] == pytest.approx(1e3 * whole)
            assert row[f"share_of_answer_{tokens}"] == pytest.approx(visual / whole)
        assert [row[f"{part}_share"] * visual for part in overhead.PARTS] == pytest.approx([tower, scoring, selection])
        assert row["overhead_quartile_1_ms"] <= row["overhead_ms"] <= row["overhead_quartile_3_ms"]
        assert (row["paper_lowest_ms"], row["paper_highest_ms"]) == (None, None)
    assert "k = 4, milliseconds: clustrs " in result.findings
    assert "ClustRS adds least" in result.findings


def test_real_time_and_files(folder_of: Folders, tmp_path: Path) -> None:
    """Whatever the clock says, the columns fit each other; crops and drawn scenes work."""
    words = (
        "--methods",
        "none,clustrs shrink=false",
        "--keep",
        6,
        "--repeats",
        2,
        "--new-tokens",
        3,
        "--crops",
        "base",
    )
    result = run(folder_of("llava_onevision", "siglip"), *words)
    png, svg, table = result.save(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["keep"]) for row in rows] == [("none", "all"), ("clustrs shrink=false", "6")]
    for row in rows:
        parts = [float(row[f"{part}_ms"]) for part in ("vision", "scoring", "selection")]
        assert float(row["overhead_ms"]) == pytest.approx(sum(parts))
        assert 0 < parts[0] <= float(row["overhead_ms"]) < float(row["answer_3_ms"])
        assert float(row["share_of_answer_3"]) == pytest.approx(sum(parts) / float(row["answer_3_ms"]))
    assert (float(rows[0]["scoring_ms"]), float(rows[0]["selection_ms"])) == (0, 0)
    assert float(rows[1]["scoring_ms"]) * float(rows[1]["selection_ms"]) > 0


def test_the_papers_table_is_beside_its_model() -> None:
    contestants = [
        Contestant("none", NoPruning()),
        Contestant("clustrs", ClustRS(keep=16)),
        Contestant("clustrs", ClustRS(keep=144)),
        Contestant("fastervlm", FasterVLM(keep=144)),
        Contestant("clustrs tau=2", ClustRS(keep=144, tau=2.0)),
        Contestant("clustrs", ClustRS(keep=50)),
    ]
    timings = [[Timing(0.03, 0.001, 0.002, (0.05, 0.06))] for _ in contestants]

    def printed(model: str) -> list[Any]:
        rows = overhead.summarize(contestants, timings, [2], model)
        return [(row["paper_lowest_ms"], row["paper_highest_ms"]) for row in rows]

    nothing = (None, None)
    assert printed("llava-hf/llava-1.5-7b-hf") == [nothing, (35, 35), (52, 52), (33, 34), nothing, nothing]
    assert printed("llava-hf/llava-1.5-13b-hf") == [nothing] * 6
    rows = overhead.summarize(contestants, timings, [2], "llava-hf/llava-1.5-7b-hf")
    text = overhead.findings(rows, [2], "a machine")
    assert "The paper prints an overhead of 52 ms (A100)." in text
    assert "its overhead is 55.0% of an answer of 2 tokens" in text
    axis = overhead.draw(rows, [2], "llava-1.5-7b").axes[0]
    assert "paper (A100)" in [label.get_text() for label in axis.get_legend().get_texts()]
    for total, row in zip(axis.texts, rows, strict=True):
        assert total.get_text() == f"{row['overhead_ms']:.1f} ms"
        assert total.xy[0] >= row["overhead_ms"], "the total stands at the end of the whole bar"


def test_quartiles() -> None:
    runs = [Timing(vision, 0.0, 0.0, (10.0,)) for vision in (0.001, 0.002, 0.003, 0.005, 0.009)]
    (row,) = overhead.summarize([Contestant("none", NoPruning())], [runs], [1], "model")
    ends = (row["overhead_quartile_1_ms"], row["overhead_ms"], row["overhead_quartile_3_ms"])
    assert ends == pytest.approx((2, 3, 5))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--repeats", "0"), "--repeats must be an integer from 1"),
        (("--count", "-1"), "--count must be an integer from 1"),
        (("--new-tokens", "0"), "--new-tokens must be an integer from 1"),
        (("--new-tokens", "14,14"), "--new-tokens has a duplicate value: 14"),
        (("--keep", "some"), "--keep must be a count"),
        (("--methods", "clusters"), "clusters"),
        (("--crops", "none"), "--crops must be one of all, base"),
    ],
)
def test_mistakes(folder_of: Folders, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(folder_of("llava", "clip"), *words)
