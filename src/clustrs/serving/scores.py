"""How much a vision tower of vLLM attends to each token.

vLLM builds a tower only up to the layer that the projector reads, so its last attention layer is the one that counts.
A hook before that layer's attention sees queries and keys, whatever made them (LoRA, quantisation); the scores come
from the same function as with transformers.
"""

from typing import Any

from torch import Tensor, nn

from clustrs.models.scoring import Reduction, attention_scores


class TowerScores:
    """Collects scores [B, N] and keys [B, N or N + 1, K] of a tower's calls, over all heads: a CLS token has a key and
    no score. `layer` is an attention layer of vLLM's CLIP or SigLIP."""

    def __init__(self, layer: Any, reduction: Reduction) -> None:
        self.heads, self.scale, self.ranks = layer.num_heads_per_partition, layer.scale, layer.tp_size
        self.reduction = reduction
        self._heard: list[tuple[Tensor, Tensor]] = []
        layer.attn.register_forward_pre_hook(self._hear)

    def _hear(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        query, key = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in inputs[:2])
        scores = attention_scores(query, key, self.scale, self.reduction)
        self._heard.append((mean_over_ranks(scores, self.ranks), mean_over_ranks(key.float().mean(1), self.ranks)))

    def clear(self) -> None:
        """Forget calls that nobody asked about."""
        self._heard.clear()

    def take(self) -> tuple[Tensor, Tensor]:
        """The scores and keys of the only call since the last `clear`."""
        if len(self._heard) != 1:
            raise RuntimeError(f"the vision tower was heard {len(self._heard)} times, once is expected")
        return self._heard.pop()


def mean_over_ranks(mean: Tensor, ranks: int) -> Tensor:
    """The mean over all heads, from each rank's mean over its own; every rank has equally many."""
    if ranks == 1:
        return mean
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(mean) / ranks


def last_attention(tower: Any) -> Any:
    """The attention layer of the last block that a CLIP or SigLIP tower of vLLM has."""
    return tower.vision_model.encoder.layers[-1].self_attn
