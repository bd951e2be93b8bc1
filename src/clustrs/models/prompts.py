"""The words around a question: the checkpoint's own chat template, or the one that LLaVA-1.5 is evaluated with."""

from typing import Any

from clustrs.options import PromptTemplate

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
    if template == "vicuna_v1":
        return VICUNA_V1.format(image=placeholder, question=question)
    if template != "checkpoint":
        raise ValueError(f"prompt_template={template!r}: give one of 'checkpoint', 'vicuna_v1'")
    if not getattr(processor, "chat_template", None):
        plain = PLAIN_PROMPTS.get(type(processor).__name__, PLAIN_PROMPT)
        return plain.format(image=placeholder, question=question)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    try:
        return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))
    except Exception as error:  # a template is a program: it raises what it likes
        raise ValueError(f"the model's chat template failed: {' '.join(str(error).split())[:200]}") from error
