"""The Triton kernels, in Triton's interpreter, against the plain operations (conftest.py sets TRITON_INTERPRET)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import draw_image, rounded, tensors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from clustrs import ClustRS, Denoise, DivPrune, Pruner, Selection
from clustrs.ops import fused, geometry, noise, plain

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
from clustrs.ops import kernels

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def both(method: Pruner, tokens: torch.Tensor, attention: torch.Tensor) -> tuple[Selection, Selection]:
    with fused.switch("off"):
        expected = method.select(tokens, attention)
    with fused.switch("on"):
        return expected, method.select(tokens, attention)


def assert_same(expected: Selection, ours: Selection, tolerance: float) -> None:
    assert torch.equal(expected.indices, ours.indices)
    assert expected.labels is not None
    assert ours.labels is not None
    assert torch.equal(expected.labels, ours.labels)
    assert ours.tokens.dtype == expected.tokens.dtype
    size = 1 + expected.tokens.abs().max().item()
    torch.testing.assert_close(ours.tokens, expected.tokens, rtol=tolerance, atol=tolerance * size)
    torch.testing.assert_close(ours.centroids, expected.centroids, rtol=tolerance, atol=tolerance * size)
    torch.testing.assert_close(ours.alpha, expected.alpha, rtol=0.02, atol=0.02)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.one_of(st.integers(1, 5), st.integers(6, 40)),
    share=st.floats(0.02, 1.0),
    width=st.integers(1, 12),
    batch=st.integers(1, 3),
    duplicates=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    zero_attention=st.sampled_from([0.0, 0.5, 1.0]),
    ties=st.booleans(),
    offset=st.sampled_from([0.0, 100.0]),
    dtype=st.sampled_from(list(DTYPES)),
    tau=st.sampled_from([0.3, 1.0, 2.0]),
    iterations=st.integers(1, 4),
    distance=st.sampled_from(["huber", "euclidean"]),
    centroid=st.sampled_from(["mean", "huber"]),
    draws=st.sampled_from([0, 7, 2**40 + 3]),
)
@pytest.mark.slow
def test_kernels_choose_what_the_plain_operations_choose(
    seed: int, n: int, share: float, width: int, batch: int, dtype: torch.dtype, draws: int, **options: Any
) -> None:
    nasty = {name: options.pop(name) for name in ("duplicates", "zero_attention", "ties", "offset")}
    images = [rounded(draw_image(seed + i, n, width, **nasty), dtype) for i in range(batch)]
    tokens, attention, _ = tensors(images, dtype)
    method = ClustRS(keep=max(1, min(12, round(share * n))), tolerance=0.0, seed=draws, **options)
    assert_same(*both(method, tokens, attention), DTYPES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(576, 16), (729, 24), (2880, 8)])
def test_kernels_at_real_sizes(n: int, k: int) -> None:
    tokens, attention, _ = tensors([draw_image(3, n, 48, duplicates=0.1)])
    assert_same(*both(ClustRS(keep=k), tokens, attention), 1e-5)


@pytest.mark.slow
def test_denoise_uses_the_kernels() -> None:
    tokens, attention, _ = tensors([draw_image(5, 40, 6)])
    expected, ours = both(Denoise(DivPrune(keep=5)), tokens, attention)
    assert_same(expected, ours, 1e-5)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**32 + 1, 2**63 + 12345678901])
def test_waiting_times(seed: int) -> None:
    like = torch.zeros(())
    assert torch.equal(-fused.log_uniform(seed, 5, 40, like), noise.waiting_times(seed, 5, 40, like))
    assert kernels.ROUNDING.value == geometry.ROUNDING


def test_when_the_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 4, 2)
    assert fused.steps(tokens) is plain  # a CPU
    with fused.switch("on"):
        assert fused.steps(tokens) is fused
        assert fused.steps(tokens.half()) is fused
        assert fused.steps(tokens.double()) is plain
        assert fused.steps(torch.zeros(1, fused.LARGEST + 1, 1)) is plain
        assert fused.steps(tokens.to("meta")) is plain
        with fused.switch("off"):
            assert fused.steps(tokens) is plain
    with pytest.raises(ValueError, match="mode 'fast': give 'auto', 'off' or 'on'"), fused.switch("fast"):  # type: ignore[arg-type]
        pass


class Launches(TorchDispatchMode):
    """Counts operations that compute something: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        if not view and func.overloadpacket.__name__ not in ("empty", "empty_like", "detach"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from triton.runtime import interpreter

    names: list[str] = []
    run = interpreter.InterpretedFunction.run

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        with _disable_current_modes():  # the interpreter's own copies are not launches
            return run(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", counting)
        yield names


@pytest.mark.slow
def test_a_selection_of_144_tokens_is_at_most_40_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, attention, _ = tensors([draw_image(3, 160, 8)])
    with counted_kernels(monkeypatch) as launched, fused.switch("on"), Launches() as operations:
        ClustRS(keep=144).select(tokens, attention, check=False)
    assert launched.count("seeding_kernel") == 1
    assert len(launched) + len(operations.names) <= 40, (launched, operations.names)
