"""Processors on machines without torchvision, which their video halves need and their image halves do not."""

import re
from importlib.util import find_spec
from typing import Any

import transformers as tf

from clustrs.models.gemma4_processor import Gemma4Processor


class LlavaOnevisionProcessor(tf.LlavaOnevisionProcessor):  # type: ignore[misc]
    """The processor for images only. It has the name of the whole one, so that what it saves reads as that."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        vision_feature_select_strategy: str | None = None,
        chat_template: str | None = None,
        image_token: str = "<image>",
        video_token: str = "<video>",
        vision_aspect_ratio: str = "anyres_max_9",
        **kwargs: Any,
    ) -> None:
        self.num_image_tokens = num_image_tokens
        self.vision_feature_select_strategy = vision_feature_select_strategy
        self.image_token = getattr(tokenizer, "image_token", None) or image_token
        self.video_token = getattr(tokenizer, "video_token", None) or video_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        self.vision_aspect_ratio = vision_aspect_ratio
        tf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class InternVLProcessor(tf.InternVLProcessor):  # type: ignore[misc]
    """InternVL's processor for images only, under the name of the whole one."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.image_seq_length = image_seq_length
        for name in ("start_image_token", "end_image_token", "video_token"):
            setattr(self, name, getattr(tokenizer, name))
        self.start_image_token_id = tokenizer.start_image_token_id
        self.end_image_token_id = tokenizer.end_image_token_id
        self.image_token = tokenizer.context_image_token
        self.image_token_id = tokenizer.context_image_token_id
        image, video = re.escape(self.image_token), re.escape(self.video_token)
        self.multimodal_pattern = re.compile(f"(?P<image>{image})|(?P<video>{video})")
        tf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class SmolVLMProcessor(tf.SmolVLMProcessor):  # type: ignore[misc]
    """SmolVLM's processor for images only, under the name of the whole one. It does not need num2words, either."""

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        image_seq_len: int = 169,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.fake_image_token = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        self.image_token = getattr(tokenizer, "image_token", "<image>")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.end_of_utterance_token = getattr(tokenizer, "end_of_utterance_token", "<end_of_utterance>")
        self.global_image_token = getattr(tokenizer, "global_image_token", "<global-img>")
        self.video_token = getattr(tokenizer, "video_token", "<video>")
        self.image_seq_len = image_seq_len
        tf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """As all processors do it: SmolVLM's own asks its video half for numbers of frames."""
        return tf.ProcessorMixin.apply_chat_template(self, *args, **kwargs)


def image_only(whole: Any) -> Any:
    """A processor class without its video half, under the name of the whole one."""

    def get_attributes(cls: Any) -> list[str]:
        return [part for part in whole.get_attributes() if part != "video_processor"]

    return type(whole.__name__, (whole,), {"get_attributes": classmethod(get_attributes), "__doc__": whole.__doc__})


QWEN3_VL = image_only(tf.Qwen3VLProcessor)
IMAGE_ONLY: dict[str, Any] = {
    "llava_onevision": LlavaOnevisionProcessor,
    "internvl": InternVLProcessor,
    "smolvlm": SmolVLMProcessor,
    "gemma4": Gemma4Processor,
    "qwen2_vl": image_only(tf.Qwen2VLProcessor),
    "qwen2_5_vl": image_only(tf.Qwen2_5_VLProcessor),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_VL,
    "qwen3_5_moe": QWEN3_VL,
}
"""By model type: what stands in for the processor where torchvision is missing."""


def load_processor(source: str) -> Any:
    """A folder's or a hub id's processor; for images only where what its video half needs is missing."""
    torchvision = find_spec("torchvision") is not None
    if not torchvision or find_spec("num2words") is None:
        kind = tf.AutoConfig.from_pretrained(source, trust_remote_code=False).model_type
        if kind in IMAGE_ONLY and (not torchvision or kind == "smolvlm"):
            return IMAGE_ONLY[kind].from_pretrained(source, trust_remote_code=False)
    return tf.AutoProcessor.from_pretrained(source, trust_remote_code=False)
