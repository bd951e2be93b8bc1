"""What all pruned models share: how many placeholders an image has, in prompt, profiling and scheduler alike."""

import json
from functools import cache
from typing import Any

from clustrs.pruners.base import Pruner
from clustrs.serving import config


def pruned_method(hf_config: Any) -> Pruner:
    """The method that a model's config names."""
    return _method(json.dumps(getattr(hf_config, config.KEY), sort_keys=True))


@cache
def _method(settings: str) -> Pruner:
    return config.read_method(json.loads(settings))


class PrunedInfo:
    """Goes before a family's processing info: k placeholders per image, in caches of their own."""

    @property
    def method(self) -> Pruner:
        return pruned_method(self.get_hf_config())  # type: ignore[attr-defined]

    @property
    def model_id(self) -> str:
        """Part of the keys of vLLM's caches, some of which servers may share: other settings, other features."""
        return f"{super().model_id}|{json.dumps(self.method.to_dict(), sort_keys=True)}"  # type: ignore[misc]

    def get_num_image_tokens(self, **size: int) -> int:
        """How many placeholders an image of some width and height has."""
        return self.method.count(super().get_num_image_tokens(**size))  # type: ignore[misc]
