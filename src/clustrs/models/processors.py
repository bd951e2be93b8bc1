"""Processors on machines without torchvision, which their video half needs and their image half does not."""

from importlib.util import find_spec
from typing import Any

import transformers as tf


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


def image_only(whole: Any) -> Any:
    """A processor class without its video half, under the name of the whole one."""

    def get_attributes(cls: Any) -> list[str]:
        return [part for part in whole.get_attributes() if part != "video_processor"]

    return type(whole.__name__, (whole,), {"get_attributes": classmethod(get_attributes), "__doc__": whole.__doc__})


QWEN3_VL = image_only(tf.Qwen3VLProcessor)
IMAGE_ONLY = {
    "llava_onevision": LlavaOnevisionProcessor,
    "qwen2_vl": image_only(tf.Qwen2VLProcessor),
    "qwen2_5_vl": image_only(tf.Qwen2_5_VLProcessor),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_VL,
    "qwen3_5_moe": QWEN3_VL,
}
"""By model type: what stands in for the processor where torchvision is missing."""


def load_processor(source: str) -> Any:
    """A folder's or a hub id's processor; without its video half where torchvision is missing."""
    if find_spec("torchvision") is None:
        kind = tf.AutoConfig.from_pretrained(source, trust_remote_code=False).model_type
        if kind in IMAGE_ONLY:
            return IMAGE_ONLY[kind].from_pretrained(source, trust_remote_code=False)
    return tf.AutoProcessor.from_pretrained(source, trust_remote_code=False)
