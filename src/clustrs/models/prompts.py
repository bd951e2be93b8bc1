"""The words around a question: the checkpoint's own chat template, or the one it was trained with."""

from typing import Any

PLAIN_PROMPT = "USER: {image}\n{question} ASSISTANT:"
"""For processors without a chat template: how LLaVA-1.5 was trained."""


def chat_prompt(processor: Any, question: str) -> str:
    """The question with one image before it, in the words that the model was trained on."""
    if not question.strip():
        raise ValueError("the question is empty: give some words")
    placeholder = processor.image_token
    if placeholder in question:
        raise ValueError(f"the question has {placeholder!r} in it, which stands for a image: leave it out")
    if not getattr(processor, "chat_template", None):
        return PLAIN_PROMPT.format(image=placeholder, question=question)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    try:
        return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))
    except Exception as error:  # a template is a program: it raises what it likes
        raise ValueError(f"the model's chat template failed: {' '.join(str(error).split())[:200]}") from error
