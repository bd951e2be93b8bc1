"""Documents of lmms-eval's tasks as prompts: where images stand, and how they are corrupted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clustrs import NoPruning
from clustrs.corruptions import Corruption
from clustrs.models.ask import SYSTEM, messages_prompt
from clustrs_lmms.engine import ModelArguments, PromptBuilder, fingerprint, user_turn

NOISE = Corruption("gaussian", 0.5)


class Templated:
    """A processor whose chat template writes roles and parts."""

    image_token = "<image>"
    chat_template = "..."

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        turns = [
            f"{message['role']}:" + "".join(f"[{part.get('text', 'IMAGE')}]" for part in message["content"])
            for message in messages
        ]
        return " ".join([*turns, "assistant:"])


class Plain:
    """A processor without a template."""

    image_token = "<image>"


def builder(corruption: Corruption | None = None, seed: int = 0, image_id: str | None = None) -> PromptBuilder:
    arguments = ModelArguments(
        pretrained="mini-llava", method=NoPruning(), corrupt=corruption, seed=seed, image_id=image_id
    )
    return PromptBuilder(Templated(), arguments)


def drawn(value: int) -> Image.Image:
    return Image.fromarray(np.full((8, 10, 3), value, dtype=np.uint8))


def pixels(image: Image.Image) -> list[int]:
    return list(image.tobytes())


def test_images_come_before_the_text() -> None:
    prompt = builder().build(user_turn([drawn(1), [drawn(2)]], "Which?"), {}, "task 0")
    assert prompt.text == "user:[IMAGE][IMAGE][Which?] assistant:"
    assert [image.getpixel((0, 0)) for image in prompt.images] == [(1, 1, 1), (2, 2, 2)]


def test_images_stand_where_the_text_has_placeholders() -> None:
    prompt = builder().build(user_turn([drawn(1), drawn(2)], "Is <image> like <image>?"), {}, "task 0")
    assert prompt.text == "user:[Is][IMAGE][like][IMAGE][?] assistant:"


def test_a_conversation_keeps_its_turns() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image", "url": drawn(1)}]},
    ]
    assert builder().build(messages, {}, "task 0").text == "system:[Be brief.] user:[Look:][IMAGE] assistant:"


def test_a_task_without_images() -> None:
    prompt = builder(NOISE).build(user_turn(None, "2 + 2?"), {}, "task 0")
    assert (prompt.text, prompt.images) == ("user:[2 + 2?] assistant:", ())


def test_files_and_other_modes_become_rgb(tmp_path: Path) -> None:
    drawn(7).convert("L").save(tmp_path / "a.png")
    opened = builder().build(user_turn([str(tmp_path / "a.png"), drawn(7).convert("RGBA")], "?"), {}, "task 0").images
    assert [image.mode for image in opened] == ["RGB", "RGB"]
    assert pixels(opened[0]) == pixels(opened[1]) == pixels(drawn(7))


def test_corruption_depends_on_the_named_image_alone() -> None:
    """As in `clustrs eval`: image id, corruption, level and seed."""
    image = drawn(100)
    prompt = builder(NOISE, 3, "name").build(user_turn([image], "?"), {"name": "scene-1", "other": 5}, "task 7")
    assert pixels(prompt.images[0]) == pixels(NOISE.apply(image, "scene-1", 3))
    again = builder(NOISE, 3, "name").build(user_turn([image], "What else?"), {"name": "scene-1"}, "task 8")
    assert pixels(again.images[0]) == pixels(prompt.images[0])
    assert pixels(
        builder(NOISE, 4, "name").build(user_turn([image], "?"), {"name": "scene-1"}, "").images[0]
    ) != pixels(prompt.images[0])


def test_an_image_without_a_name_is_known_by_its_pixels() -> None:
    first = builder(NOISE).build(user_turn([drawn(100)], "A?"), {"id": 1}, "task 1").images[0]
    second = builder(NOISE).build(user_turn([drawn(100)], "B?"), {"id": 2}, "task 2").images[0]
    assert pixels(first) == pixels(second) == pixels(NOISE.apply(drawn(100), fingerprint(drawn(100)), 0))
    assert fingerprint(drawn(100)) != fingerprint(drawn(101))
    assert fingerprint(drawn(100)) != fingerprint(drawn(100).transpose(Image.Transpose.ROTATE_90))


def test_several_images_of_a_document_have_names_of_their_own() -> None:
    document = {"names": ["a", "b"], "name": "c"}
    both = user_turn([drawn(1), drawn(1)], "?")
    listed = builder(NOISE, 0, "names").build(both, document, "").images
    assert [pixels(image) for image in listed] == [pixels(NOISE.apply(drawn(1), name, 0)) for name in ("a", "b")]
    numbered = builder(NOISE, 0, "name").build(both, document, "").images
    assert [pixels(image) for image in numbered] == [pixels(NOISE.apply(drawn(1), name, 0)) for name in ("c#0", "c#1")]


@pytest.mark.parametrize(
    ("messages", "document", "message"),
    [
        (user_turn([drawn(1)], "?"), {"id": 1}, "pope 3: image_id must be a field of the document"),
        (
            user_turn([drawn(1)], "?"),
            {"name": ["a", "b"]},
            "pope 3: image_id must be a field with a name for each",
        ),
        (user_turn([drawn(1)], "?"), {"name": None}, "pope 3: image_id must be a field with a name for each"),
        (user_turn([drawn(1)], "<image> <image>"), {"name": "a"}, "pope 3: the text has 2 times '<image>'"),
        (user_turn([3], "?"), {"name": "a"}, "pope 3: an image is a int: a PIL image or the name of a file"),
        (user_turn(["no.png"], "?"), {"name": "a"}, "pope 3: image 'no.png': there is no such file"),
        (
            [{"role": "user", "content": [{"type": "video", "url": "a.mp4"}]}],
            {"name": []},
            "pope 3: video is not supported",
        ),
    ],
)
def test_mistakes_name_the_document(messages: Any, document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builder(NOISE, 0, "name").build(messages, document, "pope 3")


def test_words_of_llava_have_images_in_front() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image"}, {"type": "image"}]}]
    assert messages_prompt(Templated(), messages, "vicuna_v1") == f"{SYSTEM} USER: <image>\n<image>\nWhat? ASSISTANT:"
    assert messages_prompt(Plain(), messages) == "USER: <image>\n<image>\nWhat? ASSISTANT:"
    text = [{"role": "user", "content": [{"type": "text", "text": "{What}?"}]}]
    assert messages_prompt(Plain(), text) == "USER: {What}? ASSISTANT:"


def test_words_of_llava_are_for_one_turn() -> None:
    messages = [{"role": role, "content": []} for role in ("system", "user")]
    with pytest.raises(ValueError, match="messages must be one turn of a user for prompt_template='vicuna_v1'"):
        messages_prompt(Templated(), messages, "vicuna_v1")
