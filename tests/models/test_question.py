"""The question reaches a method: which text of a prompt it is, in every family, batch, turn and caller."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import BUILDERS, SAME_ADAPTER, Load, asked, byte_tokenizer, make_image, prepare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from clustrs import CDPruner, ClustRS, Denoise, Pruner, PrunerInputs
from clustrs.models import ask as sharing
from clustrs.models.adapters.base import get_adapter
from clustrs.models.ask import ask, chat_prompt, messages_prompt
from clustrs.models.question import QuestionReader

QUESTION, OTHER = "What is this?", "Is the large dog brown?"
Content = list[dict[str, str]]


@dataclass(frozen=True)
class Spy(Pruner):
    """Keeps the first tokens, and what it was given."""

    name = "spy"
    needs = ("question",)
    seen: list[PrunerInputs] = field(default_factory=list, compare=False)

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        self.seen.append(inputs)
        return torch.arange(k).repeat(len(inputs.tokens), 1)

    def questions(self) -> list[Tensor]:
        """Of each image, without padding, those of the last call."""
        masks = [(inputs.question, inputs.question_mask) for inputs in self.seen]
        self.seen.clear()
        return [q[m] for questions, mask in masks for q, m in zip(questions, mask, strict=True)]  # type: ignore[arg-type]


PARTS = "{% for part in message.content %}{{ 'IMAGE' if part.type == 'image' else part.text }}{% endfor %}"
LINES = "{% for part in message.content %}{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n" + PARTS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "qwen": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    + CHATML.replace("IMAGE", "<|vision_start|><image><|vision_end|>"),
    "internvl": CHATML.replace("IMAGE", "<img><image></img>\n"),
    "onevision": CHATML.replace("\n", " ").replace("IMAGE", "<image>\n").replace("<|im_end|> ", "<|im_end|>"),
    "smolvlm": "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}:"
    "{{ '' if message.content[0].type == 'image' else ' ' }}"
    + PARTS.replace("IMAGE", "<fake><image><fake>")
    + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    "gemma": "<s>{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    + PARTS.replace("IMAGE", "\n\n<img><image></img>\n\n")
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "vicuna": "{% for message in messages %}{{ message.role | upper }}: "
    + LINES
    + "{{ '</s>' if message.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "mistral": "<s>{% for message in messages %}{% if message.role == 'user' %}[INST] "
    + LINES
    + " [/INST]{% else %} "
    + LINES
    + "</s>{% endif %}{% endfor %}",
    "llama3": "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    + LINES
    + "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
}
"""How published checkpoints write turns; IMAGE and what is around it differ by family."""
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
SPECIAL += ["<|vision_end|>", "<img>", "</img>", "<fake>", "<end_of_utterance>", "<start_of_turn>", "<end_of_turn>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
BASIC = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SAID = "What is on the left? user assistant USER: ASSISTANT: model [INST] [/INST] Is the dog\n\n large? Yes. \n"


def pieces(kind: str) -> Any:
    """Tokenizers that cut text in other ways: bytes, merged bytes (GPT-2, Qwen), pieces with spaces before (Llama)."""
    if kind == "bytes":
        words = byte_tokenizer(SPECIAL, {"image_token": "<image>"}, **BASIC)
        words.add_special_tokens({"additional_special_tokens": SPECIAL[4:]})
        return words
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "metaspace"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "merges":
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        alphabet = [*map(chr, range(33, 127)), "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    core.train_from_iterator([SAID] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=SPECIAL[4:], **BASIC)


def turn(role: str, *parts: str) -> dict[str, Any]:
    """A message; the part "IMAGE" is an image."""
    content = [{"type": "image"} if part == "IMAGE" else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


CONVERSATIONS: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([turn("user", "IMAGE", "What is on the left?")], ["What is on the left?"]),
    ([turn("user", "Is the dog large? ", "IMAGE")], ["Is the dog large?"]),
    ([turn("user", "Look: ", "IMAGE", "is it?")], ["Look:is it?"]),
    ([turn("user", "IMAGE", "IMAGE", "left?")], ["left?", "left?"]),
    (
        [
            turn("user", "IMAGE", "What is on the left?"),
            turn("assistant", "Yes."),
            turn("user", "IMAGE", "large?"),
            turn("assistant", "Yes. Yes."),
            turn("user", "Is it?"),
        ],
        ["What is on the left?", "large?"],
    ),
    ([turn("user", "Is it?"), turn("assistant", "Yes."), turn("user", "IMAGE", "What?")], ["What?"]),
]


@pytest.mark.parametrize("kind", ["bytes", "merges", "metaspace"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_of_the_turn_without_the_template(name: str, kind: str) -> None:
    words = pieces(kind)
    words.chat_template = TEMPLATES[name]
    reader = QuestionReader(None, words, None, "")
    for chat, expected in CONVERSATIONS:
        text = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = words(text.replace("<image>", "<image>" * 3), add_special_tokens=False)["input_ids"]
        slots = [i for i, token in enumerate(ids) if token == SPECIAL.index("<image>")]
        assert len(slots) == 3 * len(expected)
        for i, question in enumerate(expected):
            columns = reader.columns(ids, [True] * len(ids), slots[3 * i], slots[3 * i + 2])
            read = "".join(words.decode([ids[column] for column in columns]).split())
            assert read == "".join(question.split()), (name, kind, question)


def test_words_of_llava_stand_in_for_a_template_that_was_not_used() -> None:
    words = pieces("bytes")
    words.chat_template = TEMPLATES["qwen"]
    reader = QuestionReader(None, words, None, "")
    for prompt, expected in (
        ("A chat with an assistant. USER: <image>\nWhat is it? ASSISTANT:", "What is it?"),
        ("<s><image>caption en\n", "caption en"),
        ("before <image> after", "beforeafter"),
    ):
        ids = words(prompt, add_special_tokens=False)["input_ids"]
        at = ids.index(SPECIAL.index("<image>"))
        read = words.decode([ids[c] for c in reader.columns(ids, [True] * len(ids), at, at)])
        assert read.replace(" ", "") == expected.replace(" ", ""), prompt


@pytest.mark.parametrize(
    ("family", "before", "between"),
    [
        ("gemma3", "Here is the original image ", " and here are some crops to help you see better "),
        ("qwen3_vl", "<0.5 seconds>", "<12.0 seconds>"),
        ("gemma4", "00:00 ", " 01:12 "),
        ("internvl", "Frame1: ", "\nFrame2: "),
        ("idefics3", "\nFrame from 00:00:", "\nFrame from 00:01:"),
    ],
)
def test_what_processors_write_before_tiles_and_frames(family: str, before: str, between: str) -> None:
    from clustrs.models.adapters.base import adapter_class

    words = pieces("bytes")
    words.chat_template = TEMPLATES["internvl"]
    intro = "You are provided the following series of two frames from a 0:00:02 [H:MM:SS] video.\n"
    intro = intro if family == "idefics3" else ""
    prompt = (
        f"<|im_start|>user\nLook: {intro}{before}<img><image></img>{between}<img><image></img> at 00:00 what?<|im_end|>"
    )
    ids = words(prompt, add_special_tokens=False)["input_ids"]
    slots = [i for i, token in enumerate(ids) if token == SPECIAL.index("<image>")]
    for written, expected in (
        (adapter_class(family).written_text, "Look: at 00:00 what?"),
        ("", f"Look: {intro}{before}{between}at 00:00 what?"),
    ):
        reader = QuestionReader(None, words, None, written)
        read = words.decode([ids[c] for c in reader.columns(ids, [True] * len(ids), *slots)])
        assert "".join(read.split()) == "".join(expected.split())


@pytest.mark.parametrize("family", [family for family in BUILDERS if family not in SAME_ADAPTER])
def test_every_family(load_family: Any, family: str) -> None:
    """What reaches a method is the embedding of the question's tokens alone; a padded batch is as one by one."""
    model, processor = load_family(family)
    adapter, images, texts = get_adapter(model), [make_image(60, 80), make_image(50, 70, 1)], [QUESTION, OTHER]
    prompts = [chat_prompt(processor, text) for text in (*texts, OTHER)]

    def inputs(*rows: int) -> dict[str, Any]:
        given = adapter.batch_images([images[row % 2] for row in rows])
        made = processor(images=given, text=[prompts[row] for row in rows], padding=True, return_tensors="pt")
        return {name: value for name, value in made.items() if name != "labels"}

    rows = [inputs(0), inputs(1), inputs(2)]
    together = inputs(0, 1, 2)  # the third asks the first image what the second is asked
    spy, method = Spy(keep=3), CDPruner(keep=3)
    with torch.no_grad():
        real = together["attention_mask"].bool()  # what a model says of padding is not defined
        expected = model(**together).logits[real]
        with CDPruner(keep=1000)(model):
            assert torch.equal(model(**together).logits[real], expected)
        with spy(model, processor=processor):
            model(**together)
            found = spy.questions()
            for question, text in zip(sorted(found, key=len), sorted((*texts, OTHER), key=len), strict=True):
                assert torch.equal(question, asked(model, text))
        selections = []
        with method(model) as handle:
            for one in rows:
                model.generate(**one, max_new_tokens=2, do_sample=False)
                selections.append(handle.last[0].selection.indices.tolist())
            model.generate(**together, max_new_tokens=2, do_sample=False, num_beams=2)
            assert [last.selection.indices.tolist() for last in handle.last] == selections
            assert [last.kept for last in handle.last] == [3, 3, 3]
    assert selections[0] != selections[2], "one image, two questions"
    for row, text in enumerate((*texts, OTHER)):
        answer = ask(model, processor, images[row % 2], text, method, 2)
        assert answer.image.selection.indices.tolist() == selections[row]
    numbered = [(row % 2, prompt) for row, prompt in enumerate(prompts)]
    batch = sharing.encode(model, processor, images, numbered)
    assert batch.images[0] is batch.images[2]
    replies = sharing.reply(model, processor, batch, method, 2)
    assert [reply.image.selection.indices.tolist() for reply in replies] == selections
    part = sharing.reply(model, processor, sharing.part(batch, 1), method, 2)
    assert part[0].image.selection.indices.tolist() == selections[1]


@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "denoise"])
@pytest.mark.parametrize("family", ["llava", "llava_onevision", "qwen3_vl"])
def test_positions_attention_and_shrinkage(load_family: Any, family: str, wrap: bool) -> None:
    model, processor = load_family(family)
    method: Pruner = Denoise(CDPruner(keep=5)) if wrap else CDPruner(keep=5)
    plain = ask(model, processor, make_image(60, 80), QUESTION, CDPruner(keep=5), 3)
    ways: list[dict[str, Any]] = [
        {"positions": "original", "attention": "proportional"},
        {"positions": "compact", "scope": "crop"},
    ]
    for options in ways:
        answer = ask(model, processor, make_image(60, 80), QUESTION, method, 3, **options)
        crops = len(answer.image.grids) if "scope" in options else 1
        assert answer.visual_tokens == 5 * crops
        if crops == 1:
            assert answer.image.selection.indices.tolist() == plain.image.selection.indices.tolist()
        assert (answer.image.selection.alpha is not None) == wrap


def test_turns(load: Load) -> None:
    """Each image has the question of its turn; a later turn on the cache selects nothing anew."""
    model, processor = load()
    images = [make_image(40, 60, seed) for seed in (1, 2)]
    chat = [turn("user", "IMAGE", QUESTION), turn("assistant", "No."), turn("user", "IMAGE", OTHER)]
    inputs = prepare(processor, [messages_prompt(processor, chat)], [images])
    spy, method = Spy(keep=3), CDPruner(keep=3)
    with spy(model), torch.no_grad():
        model(**inputs)
    for question, text in zip(spy.questions(), (QUESTION, OTHER), strict=True):
        assert torch.equal(question, asked(model, text))
    first = prepare(processor, [chat_prompt(processor, QUESTION)], [images[:1]])
    with spy(model), torch.no_grad():
        out = model.generate(**first, max_new_tokens=3, return_dict_in_generate=True)
        assert len(spy.questions()) == 1
        more = torch.cat([out.sequences, processor.tokenizer(OTHER, return_tensors="pt")["input_ids"]], 1)
        model.generate(input_ids=more, past_key_values=out.past_key_values, max_new_tokens=2)
        assert not spy.seen
    with method(model) as handle, torch.no_grad():
        model(**inputs)
        alone = [
            ask_indices(model, processor, image, text) for image, text in zip(images, (QUESTION, OTHER), strict=True)
        ]
        assert [last.selection.indices.tolist() for last in handle.last] == alone


def ask_indices(model: Any, processor: Any, image: Any, text: str) -> list[int]:
    """In a copy, because a method is attached to the model."""
    batch = sharing.encode(model, processor, [image], [(0, chat_prompt(processor, text))])
    (question,) = sharing.questions(model, processor, batch, CDPruner(keep=3)) or []
    tokens = batch.images[0].tokens
    return CDPruner(keep=3).select(tokens, question=question).indices.tolist()


def test_a_question_of_ones_own(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s><image> a <image> b"], [[make_image(), make_image(40, 60, 1)]])
    ids = processor.tokenizer(OTHER, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    spy = Spy(keep=3)
    for question, expected in (
        (OTHER, [OTHER, OTHER]),
        (ids, [OTHER, OTHER]),
        ([QUESTION, ids], [QUESTION, OTHER]),
        (None, ["ab", "ab"]),
    ):
        with spy(model, question=question), torch.no_grad():
            model(**inputs)
        for found, text in zip(spy.questions(), expected, strict=True):
            assert torch.equal(found, asked(model, text))


def test_errors(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s><image> a"], [[make_image()]])
    for wrong in (3, [], ["a", 3], torch.rand(3), torch.zeros(2, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"question must be a text, token ids \[T\], or a list"):
            CDPruner(keep=3).attach(model, question=wrong)
    with pytest.raises(ValueError, match="question must be None for clustrs, which does not read it, got 'a'"):
        ClustRS(keep=3).attach(model, question="a")
    with (
        CDPruner(keep=3)(model, question=["a", "b"]),
        pytest.raises(ValueError, match="one text for each of the 1 images, got 2"),
    ):
        model(**inputs)
    silent = prepare(processor, ["<s>user: <image> assistant:"], [[make_image()]])
    with CDPruner(keep=3)(model), pytest.raises(ValueError, match="the turn that holds the image has no text"):
        model(**silent)
    with CDPruner(keep=3, relevance="clip")(model), pytest.raises(ValueError, match="clip_tokens is missing"):
        model(**inputs)
    with CDPruner(keep=3)(model), pytest.raises(ValueError, match="Image features and image tokens do not match"):
        model(**{**inputs, "input_ids": inputs["input_ids"][:, :5], "attention_mask": inputs["attention_mask"][:, :5]})
    model.name_or_path = "nowhere/to-be-found"
    with pytest.raises(ValueError, match=r"processor is missing: .*'nowhere/to-be-found' has none on this machine"):
        CDPruner(keep=3).attach(model)
    model.name_or_path = ""
    with pytest.raises(
        ValueError, match=r"'LlavaForConditionalGeneration' has none .*attach\(model, processor=\.\.\.\)"
    ):
        CDPruner(keep=3).attach(model)
    with CDPruner(keep=3)(model, processor=processor), torch.no_grad():
        assert model(**inputs).logits.shape[1] == 3 + inputs["input_ids"].shape[1] - tiny_models.PATCHES
    processor.chat_template = "{{ raise_exception('no turns') }}"
    with pytest.raises(ValueError, match="the processor's chat template cannot be read for questions: no turns"):
        CDPruner(keep=3).attach(model, processor=processor)


def test_compiled_models_are_refused(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s><image> a"], [[make_image()]])
    with CDPruner(keep=3)(model), torch.no_grad():
        model(**inputs)
        with pytest.raises(Exception, match="reads the question in a prompt's ids"):
            torch.compile(model, fullgraph=True, backend="eager")(**inputs)
