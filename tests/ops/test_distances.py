"""Matrix products: right, symmetric, and the same to the last bit with any number of threads."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clustrs.ops.distances import deterministic_matmul, gram, stable_topk, top_set

sizes = st.integers(1, 400)


@given(m=sizes, n=sizes, length=st.integers(1, 600), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_deterministic_matmul(m: int, n: int, length: int, dtype: torch.dtype) -> None:
    left, right = torch.randn(m, length, dtype=dtype), torch.randn(n, length, dtype=dtype)
    torch.testing.assert_close(
        deterministic_matmul(left, right).double(), left.double() @ right.double().T, atol=1e-3, rtol=1e-5
    )


@given(n=sizes, length=st.integers(1, 600), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_gram(n: int, length: int, dtype: torch.dtype) -> None:
    rows = torch.randn(n, length, dtype=dtype)
    result = gram(rows)
    assert torch.equal(result, result.T)
    torch.testing.assert_close(result.double(), rows.double() @ rows.double().T, atol=1e-3, rtol=1e-5)


@given(st.integers(1, 3), st.integers(1, 30), st.integers(1, 30), st.integers(1, 40))
def test_of_equal_scores_the_first_are_in_the_set(batch: int, n: int, k: int, values: int) -> None:
    scores = torch.randint(values, (batch, n), generator=torch.Generator().manual_seed(n)).float()
    expected = torch.tensor([sorted(sorted(range(n), key=lambda i: (-row[i], i))[:k]) for row in scores.tolist()])
    assert torch.equal(top_set(scores, k).sort(-1).values, expected)
    assert torch.equal(stable_topk(scores, k).sort(-1).values, expected)


THREADS = """
import hashlib, torch
from clustrs.ops.distances import deterministic_matmul, gram
torch.manual_seed(0)
cases = [(576, 4096, 16), (729, 3584, 180), (37, 1000, 5), (100, 64, 1), (1440, 256, 144), (5, 3000, 4), (333, 777, 50)]
inputs = [(torch.randn(n, width), torch.rand(n, k)) for n, width, k in cases]
for threads in (1, 2, 3, 5, 8):
    torch.set_num_threads(threads)
    bits = hashlib.sha256()
    for rows, shares in inputs:
        matrix = gram(rows)
        for part in (matrix, deterministic_matmul(matrix, shares.T)):
            bits.update(part.contiguous().numpy().tobytes())
    print(bits.hexdigest())
"""


@pytest.mark.parametrize("kernels", ["as found", "avx2"])
def test_the_same_bits_with_any_number_of_threads(kernels: str) -> None:
    smaller = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    env = {**os.environ, **(smaller if kernels == "avx2" else {})}
    run = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, check=True)
    hashes = run.stdout.split()
    assert len(hashes) == 5
    assert len(set(hashes)) == 1
