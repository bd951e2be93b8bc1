"""CDPruner: the tokens that are relevant to the question and differ from each other."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import can_read_without_sync, gram, map_images
from clustrs.ops.diversity import double_rows
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs
from clustrs.pruners.registry import register

Relevance = Literal["embeddings", "clip"]
LEAST = 1e-6  # relevance of the least relevant token, and the least span of relevances that is told from rounding
SPANNED = 1e-6  # squared sine of its angle to the chosen ones below which a token is a combination of them
TIE = 1e-7  # relative difference of determinants that is taken for rounding
LAST, TAKEN = 1e300, -1.0  # minus LAST is the gain of what comes last; TAKEN stands for the distance of a chosen token
FEW, AT_ONCE = (
    3,
    32,
)  # up to one in FEW tokens, some rows of the cosines at a time, at least AT_ONCE, are quicker than all


@register
@dataclass(frozen=True)
class CDPruner(Pruner):
    """Greedily keep the token that enlarges the determinant of relevance times similarity most.

    CDPruner (https://arxiv.org/abs/2506.10967). Relevance r_j: mean cosine of token j to the question's tokens, scaled
    to (0, 1] in each image. Kernel K_ij = r_i cos(v_i, v_j) r_j; k tokens by greedy MAP of its determinantal process.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        theta: Weight of the relevance in (0, 1): r becomes exp(theta / (2 (1 - theta)) r); None leaves it as it is.
        relevance: "embeddings" compares tokens with the `question`; "clip" takes minus the cosine of CLIP's projected
            embeddings, `clip_tokens` and `clip_question`.

    Examples:
        >>> tokens = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.5, 0.5]])
        >>> CDPruner(keep=2).select(tokens, question=torch.tensor([[1.0, 0.0]])).indices
        tensor([0, 3])
    """

    name = "cdpruner"
    paper = "https://arxiv.org/abs/2506.10967"
    needs = ("question",)

    theta: float | None = None
    relevance: Relevance = field(default="embeddings", metadata=accepts(validation.choice, get_args(Relevance)))

    def __post_init__(self) -> None:
        super().__post_init__()
        theta = self.theta
        accepted = theta is None or (validation.is_number(theta) and 0 < theta < 1)
        validation.check(accepted, "theta", "None or a number between 0 and 1", theta)

    def requirements(self) -> tuple[str, ...]:
        return ("clip_tokens", "clip_question") if self.relevance == "clip" else self.needs

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        rows, scale = double_rows(inputs.tokens)
        if self.relevance == "clip":
            relevance = -mean_cosine(*double_rows(inputs["clip_tokens"]), inputs["clip_question"], None)
        else:
            relevance = mean_cosine(rows, scale, inputs["question"], inputs.question_mask)
        low, high = relevance.amin(-1, keepdim=True), relevance.amax(-1, keepdim=True)
        relevance = (relevance - low + LEAST) / (high - low).clamp(min=LEAST)
        log_quality = relevance.log() if self.theta is None else self.theta / (2 * (1 - self.theta)) * relevance
        return greedy_map(rows, scale, 2 * log_quality, k)


def mean_cosine(rows: Tensor, scale: Tensor, question: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean [B, N] of the cosines of rows [B, N, D] to those rows of [B, T, D] where `mask` is True."""
    weight = torch.ones_like(question[..., 0]) if mask is None else mask
    words, lengths = double_rows(question)
    weight = weight.double() / weight.sum(-1, keepdim=True) * lengths
    return (rows @ (weight[:, None] @ words).mT)[..., 0] * scale


def greedy_map(rows: Tensor, scale: Tensor, log_squares: Tensor, k: int) -> Tensor:
    """Choose k of N items one by one, [B, k], each enlarging the determinant of the chosen block of a kernel most.

    The kernel is q_i cos(v_i, v_j) q_j, for rows v [B, N, D], the inverse `scale` [B, N] of their norms, and log q^2
    [B, N]. Its determinant grows by q_j^2 times the squared distance of j to the span of the chosen ones, which an
    incremental Cholesky factorization of the cosines keeps (Chen et al., 2018). Once all that is left lies in that
    span, the rest follows by q alone.
    """
    batch, n, _ = rows.shape
    readable = can_read_without_sync(rows)
    lazy = readable and k * FEW <= n  # cosines of likely tokens, when one of them is chosen
    cosines = None if lazy else map_images(gram, rows) * scale[:, None] * scale[..., None]
    known: list[dict[int, Tensor]] = [{} for _ in range(batch)]  # rows of the cosines, without all
    log_squares = log_squares.nan_to_num(-LAST, LAST, -LAST)
    distance = (scale > 0).double()  # TAKEN once a token is chosen
    factor = rows.new_zeros(batch, k, n)
    gain = log_squares
    chosen: list[Tensor] = []
    for step in range(k):
        if step:
            last = chosen[-1]
            for b in range(batch) if lazy else ():
                if int(last[b]) not in known[b]:
                    done = torch.tensor([*known[b]], dtype=torch.long)
                    likely = gain[b].index_fill(0, done, -torch.inf).index_fill(0, last[b], torch.inf)
                    likely = likely.topk(min(n, max(AT_ONCE, k - step))).indices
                    found = rows[b, likely] @ rows[b].T * scale[b, likely, None] * scale[b]
                    known[b] |= dict(zip(likely.tolist(), found, strict=True))
            before = factor[:, : step - 1]
            if cosines is None:
                row = torch.stack([known[b][int(last[b])] for b in range(batch)]).unsqueeze(1)
            else:
                row = cosines.gather(1, last[..., None].expand(-1, 1, n))
            row = torch.baddbmm(row, before.gather(-1, last[:, None].expand(-1, step - 1, 1)).mT, before, alpha=-1)
            row = row[:, 0] / distance.gather(-1, last).clamp(min=SPANNED).sqrt()
            factor[:, step - 1] = row
            distance = torch.addcmul(distance, row, row, value=-1).scatter(-1, last, TAKEN)
        new = distance > SPANNED
        gain = torch.where(new, distance, 0).log().add(log_squares)
        some = new.any(-1, keepdim=True)
        if not (readable and some.all()):
            gain = torch.where(some, gain, log_squares.masked_fill(distance < TAKEN / 2, -torch.inf))
        chosen.append((gain >= gain.amax(-1, keepdim=True) - TIE).byte().argmax(-1, keepdim=True))
    return torch.cat(chosen, -1)
