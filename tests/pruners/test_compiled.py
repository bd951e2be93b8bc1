"""`Pruner.compile`, how many kernels a compiler makes of a selection, and how many operations there are without one."""

from typing import Any

import pytest
import torch
from method_cases import draw_image, tensors
from torch._inductor import config
from torch.profiler import ProfilerActivity, profile

from clustrs import ClustRS, FasterVLM


@pytest.mark.slow
def test_a_compiled_method_selects_the_same() -> None:
    tokens, attention, _ = tensors([draw_image(i, 30, 8) for i in range(2)])
    method = ClustRS(keep=5)
    torch.compiler.reset()
    compiled = method.compile()
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


class Counted(Exception):
    pass


def fused_nodes(k: int) -> int:
    """What the default compiler's scheduler makes of a selection: on an accelerator each node becomes a kernel."""
    counts: list[int] = []

    def stop(nodes: list[Any]) -> list[Any]:
        counts.append(len(nodes))
        raise Counted

    tokens, attention, _ = tensors([draw_image(0, 100, 8)])
    torch.compiler.reset()
    with config.patch(_post_fusion_custom_pass=stop), pytest.raises(Exception, match="Counted"):
        ClustRS(keep=k).compile().select(tokens, attention)
    return counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("few", [4, 14], ids=["row by row", "all costs at once"])
def test_a_compiler_needs_at_most_three_kernels_per_seed(few: int) -> None:
    assert fused_nodes(few + 4) - fused_nodes(few) <= 3 * 4


@pytest.mark.parametrize(("k", "most"), [(16, 450), (50, 720), (144, 900)])
def test_operations_without_a_compiler(k: int, most: int) -> None:
    tokens, attention = torch.randn(576, 64), torch.rand(576)
    method = ClustRS(keep=k)
    method.select(tokens, attention)  # the waiting times are kept from now on
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as record:
        method.select(tokens, attention, check=False)
    names = [event.name for event in record.events() if event.cpu_parent is None]
    assert 100 < len([name for name in names if name.startswith(("aten::", "mkldnn::"))]) <= most
