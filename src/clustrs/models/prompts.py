"""The words around a question: the checkpoint's own chat template, or the one that LLaVA-1.5 is evaluated with."""

from collections.abc import Mapping, Sequence
from typing import Any

from clustrs.validation import PromptTemplate

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
PLAIN_PROMPT = "USER: {image}\n{question} ASSISTANT:"
"""For processors without a chat template: the turns of LLaVA-1.5 without its system line."""
PLAIN_PROMPTS = {"PaliGemmaProcessor": "{image}{question}"}
"""By processor, where these turns would be wrong: PaliGemma's image comes first, then the beginning of the text."""
VICUNA_V1 = f"{SYSTEM} {PLAIN_PROMPT}"


def chat_prompt(processor: Any, question: str, template: PromptTemplate = "checkpoint") -> str:
    """Return the question with one image before it, in the words that the template has around them."""
    if not question.strip():
        raise ValueError("the question is empty: give some words")
    placeholder = processor.image_token
    if placeholder in question:
        raise ValueError(f"the question has {placeholder!r} in it, which stands for an image: leave it out")
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return messages_prompt(processor, [{"role": "user", "content": content}], template)


def messages_prompt(
    processor: Any, messages: Sequence[Mapping[str, Any]], template: PromptTemplate = "checkpoint"
) -> str:
    """Return a conversation with any number of images in the words that the template has around it.

    `messages` are those of chat templates: a role, and parts of type "image" or "text". LLaVA-1.5's words, and those
    for processors without a template, are for one turn of a user whose images come before the text.
    """
    words = plain_words(processor, template)
    if words is None:
        return apply_template(processor, messages)
    roles = [message["role"] for message in messages]
    if roles != ["user"]:
        raise ValueError(
            f"messages of {', '.join(roles)}: prompt_template={template!r} has words for one turn of a user; give one, "
            "or a model with a chat template and prompt_template='checkpoint'"
        )
    parts = messages[0]["content"]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    images = sum(part["type"] == "image" for part in parts)
    after = "\n" if "{image}\n" in words else ""
    if not images:
        words = words.replace(f"{{image}}{after}", "")
    return words.format(image=after.join([processor.image_token] * images), question=text)


def plain_words(processor: Any, template: PromptTemplate) -> str | None:
    """Return the words around one turn, or None where the checkpoint's own template has them."""
    if template == "vicuna_v1":
        return VICUNA_V1
    if template != "checkpoint":
        raise ValueError(f"prompt_template={template!r}: give one of 'checkpoint', 'vicuna_v1'")
    if getattr(processor, "chat_template", None):
        return None
    return PLAIN_PROMPTS.get(type(processor).__name__, PLAIN_PROMPT)


def apply_template(processor: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what the checkpoint's own chat template makes of messages, up to where the answer begins."""
    try:
        return str(processor.apply_chat_template(list(messages), add_generation_prompt=True))
    except Exception as error:  # a template is a program: it raises what it likes
        raise ValueError(f"the model's chat template failed: {' '.join(str(error).split())[:200]}") from error
