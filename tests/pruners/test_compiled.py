"""`Pruner.compile`, how many kernels a compiler makes of a selection, and how many operations there are without one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_cases import draw_image, tensors
from tiny_models import Load, make_image, prepare
from torch._dynamo import config as dynamo
from torch._inductor import config
from torch.profiler import ProfilerActivity, profile

from clustrs import ClustRS, FasterVLM
from clustrs.ops.kmeans import AT_ONCE


def test_a_compiled_method_selects_the_same() -> None:
    """tests/pruners/test_exactness.py does it with the default backend."""
    tokens, attention, _ = tensors([draw_image(i, 30, 8) for i in range(2)])
    method = ClustRS(keep=5)
    torch.compiler.reset()
    compiled = method.compile(backend="aot_eager")
    assert compiled == method
    assert compiled.to_dict() == method.to_dict()
    expected, ours = method.select(tokens, attention), compiled.select(tokens, attention)
    assert torch.equal(expected.indices, ours.indices)
    torch.testing.assert_close(expected.tokens, ours.tokens)
    assert method.select.__func__ is ClustRS.select  # type: ignore[attr-defined]


def test_options_reach_the_compiler() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    tokens, attention, _ = tensors([draw_image(0, 30, 8)])
    torch.compiler.reset()
    compiled = FasterVLM(keep=5).compile(backend=backend)
    assert torch.equal(compiled.select(tokens, attention).indices, FasterVLM(keep=5).select(tokens, attention).indices)
    assert len(graphs) == 1


def test_a_compiled_method_in_a_model(load: Load) -> None:
    """It selects compiled, all images of a call at once, and the model says the same as without."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, processor = load()
    inputs = prepare(processor, ["<s>a <image> b", "<s><image>"], [[make_image()], [make_image(30, 30, 1)]])
    torch.compiler.reset()
    method = ClustRS(keep=5)
    found = []
    for attached in (method, method.compile(backend=backend)):
        with torch.no_grad(), attached(model) as handle:
            new = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            found.append((model(**inputs).logits, new, [last.selection.indices for last in handle.last]))
    (logits, new, kept), (ours, our_new, our_kept) = found
    assert len(graphs) == 1, "generate and forward need one and the same graph"
    assert all(map(torch.equal, kept, our_kept))
    assert torch.equal(new, our_new)
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-5)


def test_more_sizes_than_torch_compiles() -> None:
    """An error, unless parts may run without compiling."""
    torch.compiler.reset()
    strict, lenient = (FasterVLM(keep=3).compile(backend="eager", fullgraph=full) for full in (True, False))
    with dynamo.patch(recompile_limit=2):
        for n in (10, 11):
            strict.select(torch.randn(n, 4), torch.rand(n))
        tokens, attention = torch.randn(12, 4), torch.rand(12)
        with pytest.raises(Exception, match=r"fullgraph=True|one_graph=True"):
            strict.select(tokens, attention)
        expected = FasterVLM(keep=3).select(tokens, attention)
        assert torch.equal(lenient.select(tokens, attention).indices, expected.indices)


def test_a_changed_method_is_not_compiled() -> None:
    compiled = FasterVLM(keep=5).compile(backend="eager")
    assert "select" in vars(compiled)
    assert "select" not in vars(replace(compiled, keep=4))


class Counted(Exception):
    pass


def fused_nodes(n: int, k: int) -> int:
    """What the default compiler's scheduler makes of a selection: on an accelerator each node becomes a kernel."""
    counts: list[int] = []

    def stop(nodes: list[Any]) -> list[Any]:
        counts.append(len(nodes))
        raise Counted

    tokens, attention, _ = tensors([draw_image(0, n, 8)])
    torch.compiler.reset()
    with config.patch(_post_fusion_custom_pass=stop), pytest.raises(Exception, match="Counted"):
        ClustRS(keep=k, iterations=1, shrink=False).compile().select(tokens, attention)
    return counts[0]


@pytest.mark.graphs
@pytest.mark.parametrize(("n", "few"), [(64, 3), (24, 3)], ids=["row by row", "all costs at once"])
def test_a_compiler_needs_at_most_three_kernels_per_seed(n: int, few: int) -> None:
    assert (few + 3 >= n / AT_ONCE) == (few >= n / AT_ONCE) == (n == 24)
    assert fused_nodes(n, few + 3) - fused_nodes(n, few) <= 3 * 3


@pytest.mark.parametrize(("k", "most"), [(16, 450), (50, 720), (144, 900)])
def test_operations_without_a_compiler(k: int, most: int) -> None:
    tokens, attention = torch.randn(576, 64), torch.rand(576)
    method = ClustRS(keep=k)
    method.select(tokens, attention)  # the waiting times are kept from now on
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as record:
        method.select(tokens, attention, check=False)
    names = [event.name for event in record.events() if event.cpu_parent is None]
    assert 100 < len([name for name in names if name.startswith(("aten::", "mkldnn::"))]) <= most
