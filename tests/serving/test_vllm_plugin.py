"""What the plugin does to vLLM, and what it leaves alone; scores where heads are split over ranks."""

import copy
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from vllm import ModelRegistry
from vllm.config import ModelConfig

from clustrs.embedded import model_folder
from clustrs.models.scoring import attention_scores
from clustrs.serving import interfaces, plugin
from clustrs.serving.llava import tower_scores
from clustrs.serving.pruning import PrunedModel

SETTINGS = {"method": "clustrs", "keep": 16}


def model_config(**options: Any) -> ModelConfig:
    return ModelConfig(str(model_folder("mini-llava")), dtype="float32", max_model_len=2048, **options)


def test_registering_adds_names_and_replaces_nothing() -> None:
    before = {name: ModelRegistry.models[name] for name in ModelRegistry.get_supported_archs()}
    plugin.register()
    method = ModelConfig.get_model_arch_config
    plugin.register()
    after = ModelRegistry.models
    assert ModelConfig.get_model_arch_config is method
    assert not hasattr(method.__wrapped__, plugin.MARK)
    assert {plugin.PREFIX + name for name in plugin.ARCHITECTURES} <= set(after)
    assert {plugin.BACKEND_PREFIX + name for name in plugin.BACKEND} <= set(after)
    assert all(after[name] is model for name, model in before.items())
    ours = [name for name in after if name.startswith(plugin.PREFIX)]
    assert all(after[name].module_name.startswith("vllm.") for name in after if name not in ours)


def test_registering_imports_no_model() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom clustrs.serving import plugin\nplugin.register()\n"
        "print([m for m in sys.modules if m.startswith(('clustrs.serving.llava', 'clustrs.serving.qwen', "
        "'vllm.model_executor.models.llava', 'clustrs.models'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().splitlines()[-1] == "[]"


def test_the_key_sends_a_config_to_the_pruned_model() -> None:
    plugin.register()
    given = model_config(hf_overrides={"clustrs": SETTINGS})
    assert given.architectures == given.hf_config.architectures == ["ClustrsLlavaForConditionalGeneration"]
    model, name = ModelRegistry.resolve_model_cls(given.architectures, given)
    assert (model.__module__, name) == ("clustrs.serving.llava", "ClustrsLlavaForConditionalGeneration")
    assert given.uses_mrope  # LLaVA-1.5 keeps original positions
    assert not model_config(hf_overrides={"clustrs": {**SETTINGS, "positions": "compact"}}).uses_mrope


def test_without_the_key_nothing_changes() -> None:
    plugin.register()
    given = model_config()
    assert given.architectures == ["LlavaForConditionalGeneration"]
    model, _ = ModelRegistry.resolve_model_cls(given.architectures, given)
    assert model.__module__ == "vllm.model_executor.models.llava"
    hf_config = SimpleNamespace(architectures=["GPT2LMHeadModel"], model_type="gpt2")
    before = copy.deepcopy(hf_config)
    plugin.redirect(SimpleNamespace(hf_config=hf_config, model_impl="auto"))
    assert hf_config == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_overrides": {"clustrs": {"keep": 0}}}, "keep must be a count"),
        ({"hf_overrides": {"clustrs": {"method": "nope", "keep": 4}}}, "unknown method 'nope'"),
        ({"hf_overrides": {"clustrs": {"method": "visionzip", "keep": 4}}}, "'visionzip' cannot be served"),
        ({"hf_overrides": {"clustrs": {"keep": 4, "positions": "some"}}}, "positions must be one of .*, got 'some'"),
        ({"hf_overrides": {"clustrs": {"keep": 4, "attention": "proportional"}}}, "attention must be 'plain' in vLLM"),
        (
            {"hf_overrides": {"clustrs": SETTINGS}, "model_impl": "terratorch"},
            "model_impl must be one of 'auto', 'vllm', 'transformers', got 'terratorch'",
        ),
        (
            {"hf_overrides": {"clustrs": SETTINGS, "vision_feature_layer": [-2]}, "model_impl": "vllm"},
            r"vision_feature_layer must be one layer \(an int\), got \[-2\]",
        ),
    ],
)
def test_what_cannot_be_served_stops_at_start(options: dict[str, Any], message: str) -> None:
    plugin.register()
    with pytest.raises(ValueError, match=message):
        model_config(**options)


def test_another_version_of_vllm_stops_at_start_only_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setitem(interfaces.INTERFACES, "config.model", ("ModelConfig.gone()",))
    interfaces.changes.cache_clear()
    with pytest.raises(ValueError, match=r"vLLM 0\.99\.0 lacks .*vllm\.config\.model\.ModelConfig\.gone is gone"):
        model_config(hf_overrides={"clustrs": SETTINGS})
    assert model_config().architectures == ["LlavaForConditionalGeneration"]
    interfaces.changes.cache_clear()


def attention_layer(heads: int, ranks: int) -> Any:
    """What vLLM's CLIP and SigLIP layers know of their attention."""
    return SimpleNamespace(num_heads_per_partition=heads, scale=0.25, tp_size=ranks)


def heads(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [2 images, 9 tokens, 4 heads, 16]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(2, 9, 4, 16, generator=rng), torch.randn(2, 9, 4, 16, generator=rng)


@pytest.mark.parametrize("reduction", ["cls", "received"])
def test_scores_are_those_of_the_transformers_path(reduction: Any) -> None:
    query, key = heads()
    scores, keys = tower_scores(attention_layer(4, 1), query.flatten(2), key.flatten(2), reduction == "cls")
    expected = attention_scores(query.transpose(1, 2), key.transpose(1, 2), 0.25, reduction)
    assert torch.equal(scores, expected)
    assert torch.equal(keys, key.mean(2))


def test_a_tower_must_run_once() -> None:
    model: Any = SimpleNamespace(recorded=[])
    for times, message in ((0, "ran 0 times"), (2, "ran 2 times")):
        with pytest.raises(RuntimeError, match=message):
            PrunedModel.run_tower(model, lambda n: model.recorded.extend([(1, 2)] * n), times)


def score_on_rank(rank: int, port: int, folder: str) -> None:
    """Two of the four heads."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(2)
        query, key = (part[:, :, 2 * rank : 2 * rank + 2].flatten(2) for part in heads())
        for reduction in ("cls", "received"):
            scores, keys = tower_scores(attention_layer(2, 2), query, key, reduction == "cls")
            torch.save({"scores": scores, "keys": keys}, Path(folder) / f"{reduction}-{rank}.pt")


def test_scores_of_heads_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DIST_IDENT", "clustrs")  # vLLM's launchers set it, and its CPU groups read it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(  # type: ignore[attr-defined]
        score_on_rank, (port, str(tmp_path)), nprocs=2
    )
    query, key = (part.transpose(1, 2) for part in heads())
    for reduction in ("cls", "received"):
        ranks = [torch.load(tmp_path / f"{reduction}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ("scores", "keys"))
        torch.testing.assert_close(ranks[0]["scores"], attention_scores(query, key, 0.25, reduction))
        torch.testing.assert_close(ranks[0]["keys"], key.mean(1))
        alone = attention_scores(query[:, :2], key[:, :2], 0.25, reduction)
        assert (ranks[0]["scores"] - alone).abs().max() > 1e-3
