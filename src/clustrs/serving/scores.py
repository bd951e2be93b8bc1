"""How much a vision tower of vLLM attends to each token.

vLLM builds a tower only up to the layer that the projector reads, so its last attention layer is the one that counts.
A hook before that layer's attention sees queries and keys, whatever made them (LoRA, quantisation); the scores come
from the same function as with transformers.
"""

from typing import Any

from torch import Tensor, nn

from clustrs.models.scoring import Reduction, attention_scores


class TowerScores:
    """Collects the scores [B, N] of a tower's calls. `layer` is an attention layer of vLLM's CLIP or SigLIP."""

    def __init__(self, layer: Any, reduction: Reduction) -> None:
        self.heads, self.scale, self.ranks = layer.num_heads_per_partition, layer.scale, layer.tp_size
        self.reduction = reduction
        self._scores: list[Tensor] = []
        layer.attn.register_forward_pre_hook(self._hear)

    def _hear(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        query, key = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in inputs[:2])
        self._scores.append(mean_over_ranks(attention_scores(query, key, self.scale, self.reduction), self.ranks))

    def clear(self) -> None:
        """Forget calls that nobody asked about."""
        self._scores.clear()

    def take(self) -> Tensor:
        """The scores of the only call since the last `clear`."""
        if len(self._scores) != 1:
            raise RuntimeError(f"the vision tower was heard {len(self._scores)} times, once is expected")
        return self._scores.pop()


def mean_over_ranks(scores: Tensor, ranks: int) -> Tensor:
    """Scores over all heads, from each rank's mean over its own; every rank has equally many."""
    if ranks == 1:
        return scores
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(scores) / ranks


def last_attention(tower: Any) -> Any:
    """The attention layer of the last block that a CLIP or SigLIP tower of vLLM has."""
    return tower.vision_model.encoder.layers[-1].self_attn
