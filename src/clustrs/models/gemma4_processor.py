"""Gemma 4's processor for images and sound, without the video half, which needs torchvision."""

from typing import Any

from transformers import ProcessorMixin
from transformers.image_utils import make_nested_list_of_images
from transformers.processing_utils import ProcessingKwargs


class Gemma4ProcessorKwargs(ProcessingKwargs, total=False):  # type: ignore[call-arg, misc]
    """Options of a call: prompts are padded, and token types come along."""

    _defaults = {  # noqa: RUF012
        "text_kwargs": {"padding": True, "return_mm_token_type_ids": True},
        "images_kwargs": {"do_convert_rgb": True},
        "audio_kwargs": {},
    }


class Gemma4Processor(ProcessorMixin):  # type: ignore[misc]
    """Puts placeholders into prompts, one for each visual token of an image and for each piece of sound.

    It has the name of transformers' own, so that what it saves reads as that. That one cannot be extended here: in
    transformers 5.18 it cannot even be imported without torchvision.
    """

    valid_processor_kwargs = Gemma4ProcessorKwargs

    def __init__(
        self,
        feature_extractor: Any,
        image_processor: Any,
        tokenizer: Any,
        chat_template: str | None = None,
        image_seq_length: int = 280,
        audio_seq_length: int = 750,
        audio_ms_per_token: int = 40,
        **kwargs: Any,
    ) -> None:
        self.image_seq_length, self.audio_seq_length = image_seq_length, audio_seq_length
        self.audio_ms_per_token = audio_ms_per_token
        for name in ("image_token", "image_token_id", "boi_token", "eoi_token"):
            setattr(self, name, getattr(tokenizer, name))
        for name in ("audio_token", "audio_token_id", "boa_token", "eoa_token"):
            setattr(self, name, getattr(tokenizer, name, None))
        self.video_token = "<|video|>"
        tokenizer.add_special_tokens({"additional_special_tokens": [self.video_token]})
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        super().__init__(feature_extractor, image_processor, tokenizer, chat_template=chat_template)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, **inputs: Any) -> tuple[Any, ...]:
        """A list of images for each prompt."""
        images, text, videos, audio = super().prepare_inputs_layout(images=images, text=text, **inputs)
        return None if images is None else make_nested_list_of_images(images), text, videos, audio

    def validate_inputs(self, images: Any = None, text: Any = None, videos: Any = None, **inputs: Any) -> None:
        """Check that every image has its place in a prompt."""
        if videos is not None:
            raise ValueError("videos: they need torchvision, which is not installed")
        if text is None:
            raise ValueError("text is missing: give a prompt with the images")
        places = [prompt.count(self.image_token) for prompt in text]
        given = [len(row) for row in images] if images is not None else [0] * len(text)
        if places != given:
            raise ValueError(
                f"images: the prompts have {places} times {self.image_token}, but {given} images were given"
            )
        super().validate_inputs(images=images, text=text, videos=videos, **inputs)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """What stands in the prompt for one image."""
        count = int(image_inputs["num_soft_tokens_per_image"][image_idx])
        return f"{self.boi_token}{self.image_token * count}{self.eoi_token}"

    def replace_audio_token(self, audio_inputs: Any, audio_idx: int, **_: Any) -> str:
        """What stands in the prompt for one recording: two convolutions leave every fourth of its frames."""
        count = int(audio_inputs["input_features_mask"][audio_idx][::4].sum())
        return f"{self.boa_token}{self.audio_token * count}{self.eoa_token}"

    @property
    def model_input_names(self) -> list[str]:
        """The names of what a call returns."""
        return [*super().model_input_names, "mm_token_type_ids"]

    @property
    def unused_input_names(self) -> list[str]:
        """What the parts return and the model does not take."""
        return ["num_soft_tokens_per_image"]
