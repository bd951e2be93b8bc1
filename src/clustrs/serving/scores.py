"""How much a vision tower of vLLM attends to each token.

vLLM builds a tower only up to the layer that the projector reads, so its last attention layer is the one that counts.
A hook on that layer's projection sees queries and keys; the scores come from the same function as with transformers.
"""

from typing import Any

from torch import Tensor, nn

from clustrs.models.scoring import Reduction, attention_scores


class TowerScores:
    """Collects the scores [B, N] of a tower's next call: `take` hands them over, once."""

    def __init__(self, attention: Any, reduction: Reduction) -> None:
        self.attention, self.reduction = attention, reduction
        self._scores: list[Tensor] = []
        attention.qkv_proj.register_forward_hook(self._hear)

    def _hear(self, module: nn.Module, inputs: Any, output: Any) -> None:
        qkv = output[0] if isinstance(output, tuple) else output
        attention = self.attention
        query, key, _ = qkv.unflatten(-1, (3, attention.num_heads_per_partition, attention.head_dim)).unbind(-3)
        scores = attention_scores(query.transpose(1, 2), key.transpose(1, 2), attention.scale, self.reduction)
        self._scores.append(mean_over_ranks(scores, attention.tp_size))

    def clear(self) -> None:
        """Forget what was heard in calls that nobody asked about."""
        self._scores.clear()

    def take(self) -> Tensor:
        """The scores of the only call since the last one that was taken."""
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
