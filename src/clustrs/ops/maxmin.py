"""Greedy max-min diversity.

Every choice is the one that exact cosines make. On a CPU most of them need no exact cosine: float32 products, whose
error is bounded, leave one candidate, and only where they leave several are the cosines in question computed exactly.
"""

import torch
from torch import Tensor

from clustrs.ops.cosines import cosines, paired_cosines, raise_tiny
from clustrs.ops.geometry import stack_images
from clustrs.ops.matmul import gram
from clustrs.ops.precision import upcast_half, values_are_free

NOT_A_NUMBER = 2.0
"""What a cosine that is NaN counts as: more than any other, so that its tokens come last."""
LARGEST = 2.0**127
"""What an infinite similarity counts as: less than that of a token to itself. Every exporter can write it."""
CHUNK = 512
"""Features that are added up in float32 at once: the fewer, the smaller the error."""
SMALL = 128 * 256
"""Up to this many numbers an image has, exact cosines of everything are quicker."""


def most_diverse(tokens: Tensor, k: int) -> Tensor:
    """Choose k tokens of [B, N, D], each as unlike the chosen ones as possible in cosine: [B, k].

    The first is the one least similar to its nearest neighbour. Ties go to the lower index.
    """
    if tokens[0].numel() <= SMALL or not values_are_free(tokens):
        return max_min(cosines(tokens), k)
    return stack_images([_certain_max_min(image, k) for image in tokens.unbind(0)])


def max_min(similarity: Tensor, k: int) -> Tensor:
    """Choose by given similarities: [B, N, N] gives [B, k], in order of choice.

    A running maximum makes each choice O(N). No token is chosen twice, whatever the numbers are. `similarity` is
    overwritten.
    """
    batch, n, _ = similarity.shape
    offset = torch.arange(batch, device=similarity.device) * n
    itself = torch.eye(n, dtype=torch.bool, device=similarity.device)
    similarity.nan_to_num_(NOT_A_NUMBER, LARGEST, -LARGEST).masked_fill_(itself, -torch.inf)
    chosen = [similarity.amax(-1).argmin(-1)]
    similarity.masked_fill_(itself, torch.inf)
    rows = similarity.view(-1, n)
    closeness = similarity.new_full((batch, n), -torch.inf)
    for _ in range(k - 1):
        closeness = torch.maximum(closeness, rows.index_select(0, chosen[-1] + offset))
        chosen.append(closeness.argmin(-1))
    return torch.stack(chosen, -1)


def _certain_max_min(tokens: Tensor, k: int) -> Tensor:
    """The choice for one image [N, D]: rough cosines where they suffice, exact ones where they do not."""
    n = len(tokens)
    rough, error = rough_cosines(tokens)
    pairs_left = 2 * n
    chosen = torch.empty(k, dtype=torch.long)
    rough.fill_diagonal_(-torch.inf)
    closeness = rough.amax(-1)
    for step in range(k):
        likely = (closeness <= closeness.amin() + 2 * error).nonzero()[:, 0]
        if len(likely) != 1:
            others = chosen[:step] if step else torch.arange(n)
            near = rough[likely][:, others]
            candidate, other = (near >= near.amax(-1, keepdim=True) - 2 * error).nonzero().unbind(-1)
            pairs_left -= len(candidate)
            if pairs_left < 0 or not len(likely):  # too many near-ties, or NaN
                return max_min(cosines(tokens[None]), k)[0]
            exact = paired_cosines(tokens[likely[candidate]], tokens[others[other]])
            largest = exact.new_full((len(likely),), -torch.inf).scatter_reduce_(0, candidate, exact, "amax")
            likely = likely[largest.argmin()]
        chosen[step] = likely
        row = rough[chosen[step]]
        closeness = torch.maximum(closeness, row) if step else row.clone()
        closeness[chosen[: step + 1]] = torch.inf
    return chosen


def rough_cosines(tokens: Tensor) -> tuple[Tensor, float]:
    """Cosines [N, N] in float32, and how far they may be from the true ones.

    A float32 sum of m products is off by m 2^-24 of the sum of their magnitudes at most, which is 1 here; adding the
    chunks up and normalising the tokens costs a few roundings more.
    """
    width = tokens.shape[1]
    features = raise_tiny(upcast_half(tokens))
    norms = torch.linalg.vector_norm(features, dim=-1, keepdim=True, dtype=torch.float64)
    if features.dtype == torch.float32 and norms.amin().item() < torch.finfo(torch.float32).tiny:
        features = features.double()  # as a float32, a norm that small would be a denormal number
    unit = (features / torch.where(norms > 0, norms, 1).to(features.dtype)).float()
    parts = [gram(part.contiguous()) for part in unit.split(CHUNK, -1)]
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total, (min(CHUNK, width) + len(parts) + 16) * 2.0**-24
