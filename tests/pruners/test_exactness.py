"""Independence of a selection from the batch, the threads, the scale of the attention, the compiler, autocast."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import METHODS, draw_image, rows, tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from clustrs import ClustRS, Pruner, Selection, get_method
from clustrs.ops.distances import map_chunks

ALL = [get_method(name, keep=9, **easy) for name, easy, _ in METHODS] + [get_method("none")]
QUICK = ("clustermeans", "fastervlm", "divprune")  # those that `make test` compiles
each_method = pytest.mark.parametrize("method", ALL, ids=lambda m: f"{m.name}-{getattr(m, 'centroid', '')}")


def parts(selection: Selection) -> Iterator[tuple[str, Tensor]]:
    return ((name, part) for name, part in vars(selection).items() if part is not None)


def assert_identical(one: Selection, other: Selection) -> None:
    assert {name for name, _ in parts(one)} == {name for name, _ in parts(other)}
    for name, part in parts(one):
        assert torch.equal(part, getattr(other, name)), name


@each_method
@pytest.mark.parametrize(("n", "width"), [(30, 5), (576, 256), (729, 1152)])
def test_a_row_of_a_batch_is_the_image_alone(method: Pruner, n: int, width: int) -> None:
    tokens, attention, states = tensors([draw_image(seed, n, width, duplicates=0.2) for seed in range(3)])
    batch = method.select(tokens, attention, **states)
    for b in range(3):
        alone = method.select(tokens[b], attention[b], **rows(states, b))
        for name, part in parts(batch):
            if name == "tokens" and "projector" in method.needs:  # a linear map on a batch may round differently
                torch.testing.assert_close(part[b], alone.tokens)
            else:
                assert torch.equal(part[b], getattr(alone, name)), name


POWERS = [
    ClustRS(keep=9, attention_power=power, clip=clip) for power in (0.3, 2.5) for clip in ((0.0, 0.0), (0.1, 0.9))
]
UNEVEN = ((100, 33), (729, 64))
"""Numbers of tokens that do not fill vector registers."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", POWERS, ids=str)
def test_a_power_of_the_attention_is_the_same_in_every_batch(method: Pruner, dtype: torch.dtype) -> None:
    for n, width in UNEVEN:
        tokens, attention, _ = tensors([draw_image(seed, n, width) for seed in range(5)], dtype)
        batch = method.select(tokens, attention)
        for b in range(5):
            assert_identical(batch.image(b), method.select(tokens[b], attention[b]))


def test_elementwise_functions_do_not_depend_on_the_threads() -> None:
    """More numbers than one thread gets, in chunks that do not fill vector registers."""
    values = torch.rand(45927, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([map_chunks(torch.log, values), map_chunks(lambda part: part.pow(0.3), values)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


TINY = [
    ClustRS(keep=9, salience=False, tau=10.0),
    ClustRS(keep=9, salience=False, tau=10.0, centroid="huber", representative="medoid"),
    ClustRS(keep=9, salience=False, tau=10.0, attention_power=0.5, clip=(0, 0)),
    *(get_method(name, keep=9) for name in ("divprune", "vispruner", "tome", "visionzip", "cdpruner")),
    *(get_method(name, keep=9) for name in ("mmr", "scope", "holov")),
    get_method("denoise", keep=9, inner="divprune", salience=False),
]


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(torch.float32, (-40, -77, -120)), (torch.bfloat16, (-77, -110)), (torch.float64, (-77, -540, -990))],
    ids=str,
)
@pytest.mark.parametrize("method", TINY, ids=lambda method: f"{method.name}-{getattr(method, 'representative', '')}")
def test_tokens_of_any_size_are_told_apart(method: Pruner, dtype: torch.dtype, exponents: tuple[int, ...]) -> None:
    """Multiplied by a power of two, tokens give the same indices, and the tokens multiplied by it; also when the other
    image of the batch is of ordinary size."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"tokens": (2, 200, 192), "attention": (2, 200), "hidden": (2, 201, 24), "keys": (2, 201, 8)}
    shapes["question"] = (2, 5, 192)
    drawn = {name: (torch.randn(shape, generator=generator) * 0.05).to(dtype) for name, shape in shapes.items()}
    attention = drawn["attention"].abs()

    def select(tokens: Tensor, scale: Callable[[Tensor], Tensor] = torch.clone) -> Selection:
        hidden, keys = scale(drawn["hidden"]), scale(drawn["keys"])
        states: dict[str, Any] = {
            "hidden": hidden,
            "keys": keys,
            "projector": torch.clone,
            "question": drawn["question"],
        }
        return method.select(tokens, attention, **states)

    ordinary = select(drawn["tokens"])
    for exponent in exponents:

        def scale(part: Tensor, exponent: int = exponent) -> Tensor:
            return part * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)

        small = select(scale(drawn["tokens"]), scale)
        assert torch.equal(small.indices, ordinary.indices)
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * 16  # numbers themselves lose bits here
        torch.testing.assert_close(small.tokens, scale(ordinary.tokens), rtol=0, atol=least if exponent < -100 else 0)
        mixed = select(torch.stack([drawn["tokens"][0], scale(drawn["tokens"][1])]))
        assert torch.equal(mixed.indices, ordinary.indices)
        assert torch.equal(mixed.tokens[0], ordinary.tokens[0])


def test_small_tokens_keep_their_gradients() -> None:
    tokens, attention, _ = tensors([draw_image(3, 60, 8)])
    small = (tokens * 2.0**-77).requires_grad_()
    result = ClustRS(keep=9).select(small, attention)
    (result.tokens * 2.0**77).sum().backward()
    assert small.grad is not None
    assert 0 < float(small.grad.abs().max()) < float("inf")


@each_method
def test_permuting_the_batch_permutes_the_result(method: Pruner) -> None:
    tokens, attention, states = tensors([draw_image(seed, 40, 6) for seed in range(4)])
    order = torch.tensor([2, 0, 3, 1])
    result = method.select(tokens, attention, **states)
    permuted = method.select(tokens[order], attention[order], **rows(states, order))
    assert torch.equal(result.indices[order], permuted.indices)
    torch.testing.assert_close(result.tokens[order], permuted.tokens)


@each_method
@given(exponent=st.integers(-40, 40), factor=st.floats(1.0, 2.0), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_scaling_the_attention_changes_nothing(method: Pruner, exponent: int, factor: float, seed: int) -> None:
    tokens, attention, states = tensors([draw_image(seed, 35, 5)], torch.float64)
    result = method.select(tokens, attention, **states)
    scaled = method.select(tokens, attention * (factor * 2.0**exponent), **states)
    assert torch.equal(result.indices, scaled.indices)
    torch.testing.assert_close(result.tokens, scaled.tokens)


@each_method
@given(
    seed=st.integers(0, 2**20),
    n=st.integers(1, 50),
    keep=st.integers(1, 60),
    duplicates=st.sampled_from([0.0, 0.5, 1.0]),
    zero_attention=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=60)
def test_exactly_k_distinct_tokens(
    method: Pruner, seed: int, n: int, keep: int, duplicates: float, zero_attention: float
) -> None:
    if method.name != "none":
        method = replace(method, keep=keep)
    tokens, attention, states = tensors(
        [draw_image(seed, n, 3, duplicates=duplicates, zero_attention=zero_attention, ties=True)]
    )
    result = method.select(tokens, attention, **states).image(0)
    k = method.count(n)
    assert result.tokens.shape == (k, 3)
    indices = result.indices.tolist()
    assert len(set(indices)) == k
    assert all(-1 <= i < n for i in indices)
    if method.name != "visionzip":
        assert indices == sorted(indices)
    if k == n:
        assert torch.equal(result.tokens, tokens[0])
        assert indices == list(range(n))
    if result.labels is not None:
        kept = [(row, i) for row, i in enumerate(indices) if i >= 0]
        assert all(result.labels[i] == row for row, i in kept)
        assert set(result.labels.tolist()) == ({row for row, _ in kept} or {-1})


THREADS = """
import sys, torch
sys.path[:0] = {path!r}
from method_cases import draw_image, tensors
from test_exactness import ALL
torch.set_num_threads({threads})
for n, width in ((100, 33), (576, 640)):
    tokens, attention, states = tensors([draw_image(8, n, width)])
    for method in ALL:
        result = method.select(tokens, attention, **states)
        print(method.name, n, result.indices.tolist(), None if result.labels is None else result.labels.tolist())
"""


@pytest.mark.parametrize("kernels", ["as found", "avx2"])
def test_same_tokens_with_any_number_of_threads(kernels: str) -> None:
    """In processes of their own, once with the kernels of this machine, once with those of a smaller one."""
    smaller = (
        {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
        if kernels == "avx2"
        else {}
    )
    path = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", THREADS.format(path=path, threads=threads)],
            env={**os.environ, **smaller},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in (1, 3)
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 2 * len(ALL)


def with_few(method: Pruner) -> Pruner:
    """The steps for each kept token are unrolled: with few of them the graph is short."""
    return method if method.name == "none" else replace(method, keep=4)


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=() if m.name in QUICK else pytest.mark.graphs) for m in ALL],
    ids=lambda m: f"{m.name}-{getattr(m, 'centroid', '')}",
)
def test_compiles_into_one_graph_with_the_same_result(method: Pruner) -> None:
    """Captured as for every backend, functionalized, and run operation by operation."""
    method = with_few(method)
    tokens, attention, states = tensors([draw_image(seed, 30, 6, duplicates=0.3) for seed in range(2)])
    torch.compiler.reset()
    compiled = torch.compile(method.select, fullgraph=True, backend="aot_eager")
    assert_identical(method.select(tokens, attention, **states), compiled(tokens, attention, **states))


@pytest.mark.graphs
@pytest.mark.parametrize("method", {m.name: m for m in reversed(ALL)}.values(), ids=lambda m: m.name)
def test_compiles_with_the_default_backend(method: Pruner) -> None:
    method = with_few(method)
    tokens, attention, states = tensors([draw_image(seed, 30, 6, duplicates=0.3) for seed in range(2)])
    torch.compiler.reset()
    compiled = method.compile().select(tokens, attention, **states)
    expected = method.select(tokens, attention, **states)
    assert torch.equal(expected.indices, compiled.indices)
    torch.testing.assert_close(expected.tokens, compiled.tokens)


@each_method
@given(seed=st.integers(0, 10**6), n=st.integers(2, 120), width=st.integers(1, 80))
@settings(max_examples=25)
def test_strides_and_offsets_change_nothing(method: Pruner, seed: int, n: int, width: int) -> None:
    tokens, attention, states = tensors([draw_image(seed, n, width, cls=seed % 2 == 0) for _ in range(2)])
    expected = method.select(tokens, attention, **states)
    columns = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.cat([torch.zeros(1), tokens.flatten()])[1:].view_as(tokens)
    every_other = torch.stack([attention, attention + 1], -1)[..., 0]
    for other in (columns, shifted, tokens.repeat(1, 1, 2)[..., :width]):
        assert_identical(expected, method.select(other, every_other, **states))


@each_method
@pytest.mark.parametrize(("n", "width"), [(30, 6), (1200, 40)])
def test_never_waits_for_the_device(method: Pruner, n: int, width: int) -> None:
    """Fake tensors have no values: whatever asks for one fails."""
    tokens, attention, states = tensors([draw_image(0, n, width)])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        matrix = torch.empty(10, width)
        states |= {name: fake(part) for name, part in states.items() if isinstance(part, Tensor)}
        states["projector"] = lambda h: h @ matrix
        result = method.select(fake(tokens), fake(attention), **states, check=False)
    assert result.tokens.shape == (1, method.count(n), width)


@each_method
def test_autocast_does_not_lower_the_precision(method: Pruner) -> None:
    tokens, attention, states = tensors([draw_image(0, 60, 32)])
    plain = method.select(tokens, attention, **states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_identical(plain, method.select(tokens, attention, **states))


@each_method
def test_gradients_reach_the_tokens(method: Pruner) -> None:
    tokens, attention, states = tensors([draw_image(seed, 30, 6) for seed in range(2)], torch.float64)
    source = states["hidden"] if "projector" in method.needs else tokens
    source.requires_grad_()
    result = method.select(tokens, attention, **states)
    result.tokens.sum().backward()
    assert source.grad is not None
    if method.name == "clustrs":
        # each output row is a weighted mean of tokens, so the weights add up to one for every feature
        torch.testing.assert_close(source.grad.sum(1), torch.full((2, 6), 9.0, dtype=torch.float64))


def test_the_seed_matters_and_nothing_else() -> None:
    tokens, attention, _ = tensors([draw_image(0, 200, 8)])
    one, again, other = (get_method("clustrs", keep=20, seed=s).select(tokens, attention).indices for s in (0, 0, 1))
    torch.manual_seed(99)
    assert torch.equal(one, again)
    assert torch.equal(one, get_method("clustrs", keep=20).select(tokens, attention).indices)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    tokens, attention, _ = tensors([draw_image(0, 100, 16)], dtype)
    half = get_method("clustrs", keep=10).select(tokens, attention)
    full = get_method("clustrs", keep=10).select(tokens.float(), attention.float())
    assert half.tokens.dtype == dtype
    assert torch.equal(half.indices, full.indices)
    assert torch.equal(half.tokens, full.tokens.to(dtype))
