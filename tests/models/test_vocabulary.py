"""Words that a word-level tokenizer does not know are named; other tokenizers are never suspected."""

from types import SimpleNamespace
from typing import Any

import pytest
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from clustrs.embedded import EMBEDDED, embedded_model, model_folder
from clustrs.models.ask import name_unknown_words, unknown_words
from clustrs_models import clips
from clustrs_models.photographs import KINDS
from clustrs_models.photographs import every as photo_questions
from clustrs_models.scenes import examples
from recipes.models import tokenizer as word_level
from recipes.photo.models import vocabulary as photo_vocabulary


def processor_of(tokenizer: Any) -> Any:
    return SimpleNamespace(tokenizer=tokenizer)


@pytest.fixture(scope="module")
def known() -> Any:
    return processor_of(word_level())


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("How many objects are there?", []),
        ("HOW many Objects are there?", []),
        ("What colour is the 12 ?", []),
        ("Is there an espresso?", ["espresso"]),
        ("Is there an Espresso or a latte or an Espresso?", ["Espresso", "latte"]),
        ("What's the shape?", ["'s"]),
        ("Where is it, 你好?", ["Where", "it", "你好"]),
        ("Is the İstanbul\u0301 red?", ["İstanbul\u0301"]),
        ("a <unk> b", ["<unk>", "b"]),
    ],
)
def test_words_are_named_as_they_are_written(known: Any, question: str, expected: list[str]) -> None:
    assert unknown_words(known, question) == expected


def test_one_line_names_them_all(known: Any) -> None:
    assert name_unknown_words(known, "How many objects are there?") == ""
    assert name_unknown_words(known, "Is there an espresso?") == "not in the model's vocabulary: 'espresso'"
    line = "not in the model's vocabulary: 'espresso', 'color' (did you mean 'colour'?)"
    assert name_unknown_words(known, "Is the espresso of a color?") == line
    assert name_unknown_words(known, "Is it a latte?") == "not in the model's vocabulary: 'it', 'latte'"


@pytest.mark.parametrize("name", [model.name for model in EMBEDDED if not model.built])
def test_embedded_models_know_the_questions_of_their_task(name: str) -> None:
    model = embedded_model(name)
    assert model is not None
    stored = processor_of(tf.AutoTokenizer.from_pretrained(model_folder(name)))
    asked = [model.question]
    if model.task == "scenes":
        asked += [question.text for example in examples(10) for question in example.questions]
    elif model.task == "clips":
        asked += [question.text for example in clips.examples(10) for question in example.questions]
    else:
        asked += [question.text for kinds in (KINDS[:1], KINDS[:4]) for question in photo_questions(kinds)]
    assert not [words for question in asked if (words := unknown_words(stored, question))]
    assert unknown_words(stored, "Is there an espresso?") == ["espresso"]


def test_the_vocabulary_of_photographs_has_the_questions_about_them() -> None:
    photo = processor_of(word_level(photo_vocabulary()))
    asked = [question.text for kinds in (KINDS[:1], KINDS[:4], KINDS[-4:]) for question in photo_questions(kinds)]
    assert not [words for question in asked if (words := unknown_words(photo, question))]
    assert unknown_words(photo, "What is below the espresso?") == ["espresso"]


VOCABULARY = {"<unk>": 0, "a": 1, "b": 2, "##b": 3}


@pytest.mark.parametrize(
    "core",
    [
        models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2}, merges=[], unk_token="<unk>"),
        models.WordPiece(vocab=VOCABULARY, unk_token="<unk>"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=0),
        models.WordLevel(vocab={"a": 1, "b": 2}, unk_token="<unk>"),  # has no token for them
    ],
    ids=lambda core: type(core).__name__,
)
def test_other_tokenizers_are_not_suspected(core: Any) -> None:
    tokenizer = Tokenizer(core)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = SimpleNamespace(backend_tokenizer=tokenizer)
    assert unknown_words(processor_of(wrapped), "a b espresso") == []
    assert name_unknown_words(processor_of(wrapped), "a b espresso") == ""


def test_a_tokenizer_in_python_is_not_suspected() -> None:
    assert unknown_words(processor_of(SimpleNamespace(unk_token="<unk>")), "a b espresso") == []
