"""ToMe where the generic tests do not look: without keys."""

from dataclasses import replace

import numpy as np
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import draw_image

from clustrs import ToMe


@given(seed=st.integers(0, 1000), n=st.integers(2, 40), keep=st.integers(1, 20))
@settings(max_examples=40)
def test_without_keys_the_tokens_are_compared(seed: int, n: int, keep: int) -> None:
    image = replace(draw_image(seed, n, 4, cls=False, duplicates=0.2), keys=np.empty((n, 0)))
    result = ToMe(keep=keep).select(torch.from_numpy(image.tokens))
    expected = reference.run(ToMe(keep=keep), image)
    assert result.indices.tolist() == expected.indices
    np.testing.assert_allclose(result.tokens.numpy(), expected.tokens, atol=1e-9)


def test_by_hand() -> None:
    """0 goes to 1 and 2 goes to 3, which look the same way; then 3 groups of two pairs and one are left."""
    tokens = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 4.0], [1.0, -1.0]])
    result = ToMe(keep=3).select(tokens)
    assert result.tokens.tolist() == [[2.0, 0.0], [0.0, 3.0], [1.0, -1.0]]
    assert result.indices.tolist() == [0, 2, 4]
    assert result.labels is not None
    assert result.labels.tolist() == [0, 0, 1, 1, 2]
    assert result.merged is not None
    assert result.merged.tolist() == [True, True, False]
