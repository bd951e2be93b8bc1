"""The Triton kernels, in Triton's interpreter, against the plain operations (conftest.py sets TRITON_INTERPRET)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import draw_image, rounded, tensors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from clustrs import ClustRS, Denoise, DivPrune, Pruner, Selection
from clustrs.ops import dispatch, distances
from clustrs.ops.dispatch import FUSED, LINEAR, PLAIN
from clustrs.ops.distances import exponential_noise

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
from clustrs.ops import kernels

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def both(method: Pruner, tokens: torch.Tensor, attention: torch.Tensor) -> tuple[Selection, Selection]:
    with dispatch.switch("off"):
        expected = method.select(tokens, attention)
    with dispatch.switch("on"):
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
    tolerance=st.sampled_from([0.0, 0.01, 0.3]),
    shrink=st.booleans(),
    clip=st.sampled_from([(0.1, 0.95), (0.0, 1.0), (0.0, 0.0), (0.4, 0.4)]),
    salience=st.sampled_from([None, True, False]),
    attention_power=st.sampled_from([1.0, 0.5, 2.5]),
    draws=st.sampled_from([0, 7, 2**40 + 3]),
)
@pytest.mark.slow
def test_kernels_choose_what_the_plain_operations_choose(
    seed: int, n: int, share: float, width: int, batch: int, dtype: torch.dtype, draws: int, **options: Any
) -> None:
    nasty = {name: options.pop(name) for name in ("duplicates", "zero_attention", "ties", "offset")}
    images = [rounded(draw_image(seed + i, n, width, **nasty), dtype) for i in range(batch)]
    tokens, attention, _ = tensors(images, dtype)
    method = ClustRS(keep=max(1, min(12, round(share * n))), seed=draws, **options)
    assert_same(*both(method, tokens, attention), DTYPES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(576, 16), (729, 24), (2880, 8)])
def test_kernels_at_real_sizes(n: int, k: int) -> None:
    tokens, attention, _ = tensors([draw_image(3, n, 48, duplicates=0.1)])
    assert_same(*both(ClustRS(keep=k), tokens, attention), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero_attention", [0.0, 0.5, 1.0])
def test_two_nasty_images_at_a_real_size(zero_attention: float) -> None:
    """Ties, tokens that nothing attends to, and repeated ones."""
    draw = partial(draw_image, n=576, width=16, duplicates=0.3, zero_attention=zero_attention, ties=True)
    tokens, attention, _ = tensors([draw(seed) for seed in (4, 5)])
    assert_same(*both(ClustRS(keep=6), tokens, attention), 1e-5)


@pytest.mark.slow
def test_denoise_uses_the_kernels() -> None:
    tokens, attention, _ = tensors([draw_image(5, 40, 6)])
    expected, ours = both(Denoise(DivPrune(keep=5)), tokens, attention)
    assert_same(expected, ours, 1e-5)


def test_the_rounding_of_the_kernels() -> None:
    assert kernels.ROUNDING.value == distances.ROUNDING


def test_when_the_kernels_are_used() -> None:
    tokens = torch.zeros(1, 4, 2)
    assert dispatch.steps(tokens, 1) is PLAIN  # a CPU
    with dispatch.switch("on"):
        assert dispatch.steps(tokens, 1) is FUSED
        assert dispatch.steps(tokens.half(), 1) is FUSED
        assert dispatch.steps(tokens.double(), 1) is PLAIN
        assert dispatch.steps(torch.zeros(1, dispatch.LARGEST + 1, 1), 1) is LINEAR
        assert dispatch.steps(tokens.to("meta"), 1) is PLAIN
        with dispatch.switch("off"):
            assert dispatch.steps(tokens, 1) is PLAIN
    with pytest.raises(ValueError, match="mode must be 'auto', 'off' or 'on', got 'fast'"), dispatch.switch("fast"):  # type: ignore[arg-type]
        pass


def on_cuda(dtype: torch.dtype = torch.float32, n: int = 4) -> Any:
    """What a selection asks of tokens on a CUDA device, which need not be here."""
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=torch.Size([1, n, 2]))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_cuda` passes for a tensor with values."""
    monkeypatch.setattr(dispatch, "is_ordinary", lambda tokens: True)


@pytest.mark.usefixtures("cuda")
def test_the_kernels_are_chosen_on_cuda_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: True)
    assert dispatch.steps(on_cuda(), 1) is FUSED
    assert dispatch.steps(on_cuda(torch.bfloat16), 1) is FUSED
    assert dispatch.steps(on_cuda(torch.float64), 1) is PLAIN
    assert dispatch.steps(on_cuda(n=dispatch.LARGEST + 1), 1) is LINEAR
    with dispatch.switch("off"):
        assert dispatch.steps(on_cuda(), 1) is PLAIN
    monkeypatch.setattr(dispatch, "is_ordinary", lambda tokens: False)  # a compiler traces
    assert dispatch.steps(on_cuda(), 1) is PLAIN
    monkeypatch.undo()
    assert dispatch.steps(torch.zeros(1, 4, 2), 1) is PLAIN


@pytest.mark.usefixtures("cuda")
def test_without_triton_the_plain_operations_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch._triton_is_installed.cache_clear()
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert dispatch.steps(on_cuda(), 1) is PLAIN
    dispatch._triton_is_installed.cache_clear()
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name == "triton" or None)
    assert dispatch.steps(on_cuda(), 1) is FUSED
    dispatch._triton_is_installed.cache_clear()


@pytest.mark.parametrize(("value", "chosen"), [("0", False), (None, True)])
def test_the_environment_turns_the_kernels_off(value: str | None, chosen: bool) -> None:
    code = (
        "import torch; from types import SimpleNamespace; from clustrs.ops import dispatch;"
        "dispatch.is_ordinary = lambda tokens: True; dispatch._triton_is_installed = lambda: True;"
        "tokens = SimpleNamespace(device=torch.device('cuda'), dtype=torch.float32, shape=(1, 4, 2));"
        "print(dispatch.steps(tokens, 1) is dispatch.FUSED)"
    )
    environment = {name: text for name, text in os.environ.items() if name != "CLUSTRS_FUSED"}
    environment |= {"CLUSTRS_FUSED": value} if value else {}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == f"{chosen}\n"


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


def launches(monkeypatch: pytest.MonkeyPatch, images: int, k: int) -> tuple[int, list[str]]:
    """How many launches a selection of k tokens is, and the kernels among them; it equals the plain operations'. The
    noise of the draws, which depends on no image, is there from an earlier selection."""
    tokens, attention, _ = tensors([draw_image(seed, 160, 8) for seed in range(images)])
    exponential_noise(0, k - 1, 160, tokens)
    with counted_kernels(monkeypatch) as launched, dispatch.switch("on"), Launches() as operations:
        ours = ClustRS(keep=k).select(tokens, attention, check=False)
    assert_same(ClustRS(keep=k).select(tokens, attention), ours, 1e-5)
    return len(launched) + len(operations.names), launched


@pytest.mark.slow
def test_a_selection_of_144_tokens_is_at_most_40_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """At N = 160."""
    count, kernels = launches(monkeypatch, 1, 144)
    assert kernels.count("seeding_kernel") == 1
    assert count <= 40, kernels


def test_launches_of_further_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take all images at once; five matrix products are made image by image, and stacked."""
    counts = [launches(monkeypatch, images, 4) for images in (1, 2, 3)]
    assert [len(kernels) for _, kernels in counts] == [10] * 3
    one, two, three = (count for count, _ in counts)
    assert one <= 40
    assert two <= 50
    assert three - two == 5
