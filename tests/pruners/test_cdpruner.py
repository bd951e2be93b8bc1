"""CDPruner: determinants by brute force, questions and their padding, CLIP's embeddings, degenerate images."""

import numpy as np
import pytest
import torch
from method_cases import draw_image, tensors
from torch import Tensor

from clustrs import CDPruner, Denoise, Pruner, get_method


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=-1)


def by_determinants(tokens: Tensor, relevance: Tensor, k: int, theta: float | None) -> list[int]:
    """The rule as it is written: scale, build the kernel, add the token with the largest determinant."""
    scaled = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    if theta is not None:
        scaled = (theta / (2 * (1 - theta)) * scaled).exp()
    kernel = (scaled[:, None] * (unit(tokens) @ unit(tokens).T) * scaled).numpy()
    chosen: list[int] = []
    for _ in range(k):
        left = [i for i in range(len(kernel)) if i not in chosen]
        blocks = [kernel[np.ix_([*chosen, i], [*chosen, i])] for i in left]
        chosen.append(left[int(np.argmax([np.linalg.slogdet(block)[1] for block in blocks]))])
    return sorted(chosen)


@pytest.mark.parametrize("theta", [None, 0.2, 0.9])
@pytest.mark.parametrize("k", [1, 2, 5, 11])
def test_determinants_by_brute_force(k: int, theta: float | None) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        tokens, question = torch.randn(12, 16, generator=generator), torch.randn(5, 16, generator=generator)
        relevance = (unit(tokens) @ unit(question).T).mean(-1)
        result = CDPruner(keep=k, theta=theta).select(tokens, question=question)
        assert result.indices.tolist() == by_determinants(tokens, relevance, k, theta)
        assert torch.equal(result.tokens, tokens[result.indices])


def test_clip_embeddings() -> None:
    """Minus the cosine: of CLIP's patches those least like the text."""
    generator = torch.Generator().manual_seed(0)
    tokens, patches, text = (torch.randn(*shape, generator=generator) for shape in ((12, 16), (12, 6), (3, 6)))
    result = CDPruner(keep=5, relevance="clip").select(tokens, clip_tokens=patches, clip_question=text)
    assert result.indices.tolist() == by_determinants(tokens, -(unit(patches) @ unit(text).T).mean(-1), 5, None)
    plus = by_determinants(tokens, (unit(patches) @ unit(text).T).mean(-1), 5, None)
    assert result.indices.tolist() != plus
    with pytest.raises(ValueError, match=r"clip_tokens is missing: cdpruner needs it"):
        CDPruner(keep=5, relevance="clip").select(tokens, question=torch.rand(3, 16))
    with pytest.raises(ValueError, match=r"clip_question must have shape \[any, 6\]"):
        CDPruner(keep=5, relevance="clip").select(tokens, clip_tokens=patches, clip_question=torch.rand(3, 16))


def test_two_questions_two_selections() -> None:
    tokens, _, states = tensors([draw_image(1, 60, 9)] * 2)
    same = CDPruner(keep=6).select(tokens, question=states["question"])
    assert torch.equal(same.indices[0], same.indices[1])
    other = torch.stack([states["question"][0], -states["question"][0]])
    first, second = CDPruner(keep=6).select(tokens, question=other).indices.tolist()
    assert first == same.indices[0].tolist() != second


@pytest.mark.parametrize("method", [CDPruner(keep=6), Denoise(CDPruner(keep=6))], ids=lambda method: method.name)
def test_padding_of_a_question_counts_for_nothing(method: Pruner) -> None:
    tokens, attention, states = tensors([draw_image(seed, 50, 9) for seed in range(3)])
    lengths = (2, 7, 5)
    question = states["question"].clone()
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    question[~mask] = 1e6
    together = method.select(tokens, attention, question=question, question_mask=mask)
    for b, length in enumerate(lengths):
        alone = method.select(tokens[b], attention[b], question=states["question"][b, :length])
        for name, part in vars(alone).items():
            assert part is None or torch.equal(part, getattr(together.image(b), name)), name


def test_tokens_in_the_span_of_others_follow_by_relevance() -> None:
    """Three directions in the plane of two: the third, and copies, have no determinant left."""
    tokens = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 0], [2, 0, 0], [1, 0.2, 0], [0, 0, 0]])
    question = torch.tensor([[1.0, 0.0, 0.0]])
    kept = [CDPruner(keep=k).select(tokens, question=question).indices.tolist() for k in range(1, 6)]
    # by relevance 1, 0, .71, 1, .98, 0: first 0; farthest from it, weighted, is 2; all others lie in their plane
    assert kept == [[0], [0, 2], [0, 2, 3], [0, 2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "tokens", [torch.ones(9, 4), torch.zeros(9, 4), torch.eye(9)[:, :4]], ids=["equal", "0", "few"]
)
@pytest.mark.parametrize("theta", [None, 0.999])
def test_degenerate_images(tokens: Tensor, theta: float | None) -> None:
    for k in range(1, 9):
        indices = CDPruner(keep=k, theta=theta).select(tokens, question=torch.ones(2, 4)).indices.tolist()
        assert indices == list(range(k))


def test_errors() -> None:
    tokens = torch.rand(2, 10, 4)
    with pytest.raises(ValueError, match=r"question is missing: cdpruner needs it \(write select\(tokens, question="):
        CDPruner(keep=3).select(tokens)
    with pytest.raises(ValueError, match=r"question must have at least one token, got shape \[2, 0, 4\]"):
        CDPruner(keep=3).select(tokens, question=torch.rand(2, 0, 4))
    with pytest.raises(ValueError, match="question must be finite"):
        CDPruner(keep=3).select(tokens, question=torch.full((2, 3, 4), torch.nan))
    for mask, message in (
        (torch.ones(2, 3), "question_mask must be a tensor of booleans, got torch.float32"),
        (torch.ones(2, 2, dtype=torch.bool), r"question_mask must have shape \[2, 3\]"),
        (torch.tensor([[True] * 3, [False] * 3]), "question_mask must have a True for each image"),
    ):
        with pytest.raises(ValueError, match=message):
            CDPruner(keep=3).select(tokens, question=torch.rand(2, 3, 4), question_mask=mask)
    for theta in (0, 1, -0.5, "much", True):
        with pytest.raises(ValueError, match="theta must be None or a number between 0 and 1"):
            get_method("cdpruner", keep=3, theta=theta)
    with pytest.raises(ValueError, match="relevance must be"):
        get_method("cdpruner", keep=3, relevance="text")
    assert not CDPruner.servable
    assert not CDPruner.exportable
    assert not Denoise(CDPruner(keep=3)).servable
