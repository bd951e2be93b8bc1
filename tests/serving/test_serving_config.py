"""What the key `clustrs` may say, and what is refused before vLLM starts. None of this needs vLLM."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clustrs import ClustRS, DivPrune
from clustrs.cli.catalog import families
from clustrs.pruners.inputs import Layout
from clustrs.pruners.registry import list_methods, method_class
from clustrs.serving import interfaces, plugin


def llava(**changes: Any) -> Any:
    vision = SimpleNamespace(model_type="clip_vision_model", image_size=336, patch_size=14)
    values = {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": vision,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    return SimpleNamespace(**{**values, **changes})


def test_a_method_with_its_parameters() -> None:
    assert plugin.read_method({"keep": 64}) == ClustRS(keep=64)
    assert plugin.read_method({"method": "clustrs", "keep": 0.25, "tau": 2}) == ClustRS(keep=0.25, tau=2)
    assert plugin.read_method({"method": "divprune", "keep": 16}) == DivPrune(keep=16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (64, r"clustrs must be an object .*, got 64"),
        ({"keep": 0}, r"^keep must be a count .* got 0$"),
        ({"keep": 1.5}, r"^keep must be a count .* got 1.5$"),
        ({"keep": "64"}, r"^keep must be a count .* got '64'$"),
        ({}, r"keep is missing"),
        ({"method": "clustr", "keep": 4}, r"unknown method 'clustr' \(did you mean 'clustrs'\?\)"),
        ({"method": 3, "keep": 4}, r"method must be the name of a method .*, got 3"),
        ({"keep": 4, "tua": 2}, r"clustrs has no parameter 'tua' \(did you mean 'tau'\?\)"),
        ({"keep": 4, "attention": "proportional"}, r"attention must be 'plain' in vLLM, .*, got 'proportional'"),
        ({"keep": 4, "tau": -1}, r"tau must be a number above 0, got -1"),
        ({"method": "visionzip", "keep": 4}, r"'visionzip' cannot be served: it needs hidden and keys and projector"),
        ({"method": "vispruner", "keep": 4}, r"'vispruner' cannot be served: it needs hidden"),
        ({"method": "denoise", "inner": "vispruner", "keep": 4}, r"'denoise' cannot be served: it needs hidden"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        plugin.read_method(settings)
    assert "\n" not in str(caught.value)


def test_positions_are_those_of_the_family_unless_given() -> None:
    onevision = {"architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "llava_onevision"}
    qwen = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    for changes, by_default in ((onevision, "compact"), ({"model_type": "llava"}, "original"), (qwen, "original")):
        for settings, expected in (({}, by_default), ({"positions": "original"}, "original")):
            assert plugin.read_positions(llava(**changes, clustrs={"keep": 4, **settings})) == expected
    assert plugin.read_positions(llava(clustrs={"positions": "compact"})) == "compact"
    with pytest.raises(ValueError, match="positions must be 'auto' or 'original' for a Qwen model"):
        plugin.read_positions(llava(**qwen, clustrs={"positions": "compact"}))
    gemma = {"architectures": [plugin.GEMMA4], "model_type": "gemma4"}
    assert plugin.read_positions(llava(**gemma, clustrs={})) == "compact"
    with pytest.raises(ValueError, match="positions must be 'auto' or 'compact' for Gemma 4"):
        plugin.read_positions(llava(**gemma, clustrs={"positions": "original"}))
    with pytest.raises(ValueError, match="positions must be one of 'auto', 'compact', 'original', got 'orginal'"):
        plugin.read_positions(llava(clustrs={"positions": "orginal"}))


def test_every_method_is_served_or_says_what_it_needs() -> None:
    served = set()
    for name in list_methods():
        settings = {"method": name, "keep": 1.0, **({"inner": "divprune"} if name == "denoise" else {})}
        if method_class(name).servable:
            assert plugin.read_method(settings).name == name
            served.add(name)
        else:
            with pytest.raises(
                ValueError,
                match=f"'{name}' cannot be served: it (needs|selects by the question, but vLLM|prunes inside the lang)",
            ):
                plugin.read_method(settings)
    assert set(SERVED) <= served


CAUSAL, BOTH_WAYS = (SimpleNamespace(use_bidirectional_attention=one) for one in (None, "vision"))


def test_models_that_can_be_served() -> None:
    name, dinov2 = "LlavaForConditionalGeneration", SimpleNamespace(model_type="dinov2")
    other = {"architectures": ["InternVLForConditionalGeneration"]}
    assert plugin.choose_implementation(llava()) == (name, "vllm")
    assert plugin.choose_implementation(llava(architectures=[f"Clustrs{name}"])) == (name, "vllm")
    assert plugin.choose_implementation(llava(architectures=[f"ClustrsTransformers{name}"])) == (name, "vllm")
    assert plugin.choose_implementation(llava(), "transformers") == (name, "transformers")
    assert plugin.choose_implementation(llava(vision_config=dinov2)) == (name, "transformers")
    assert plugin.choose_implementation(llava(vision_feature_layer=[-2, -5])) == (name, "transformers")
    assert plugin.choose_implementation(llava(**other))[1] == "transformers"
    assert plugin.choose_implementation(llava(architectures=[plugin.GEMMA4], text_config=CAUSAL))[1] == "vllm"


@pytest.mark.parametrize(
    ("changes", "chosen", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "auto", "architecture GPT2LMHeadModel cannot be served pruned"),
        ({"architectures": None}, "auto", "architecture none cannot be served"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "auto", "served pruned: an image's tokens attend to"),
        (
            {"architectures": [plugin.GEMMA4], "text_config": BOTH_WAYS},
            "auto",
            "served pruned: an image's tokens attend",
        ),
        ({"architectures": [plugin.GEMMA4], "text_config": CAUSAL}, "transformers", "does not pass on token ids"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "transformers", "does not pass on deepstack"),
        ({"architectures": ["InternVLForConditionalGeneration"]}, "vllm", "has no pruned class of its own"),
        ({"vision_config": SimpleNamespace(model_type="pixtral")}, "auto", "'pixtral' cannot be served pruned"),
        ({"vision_config": SimpleNamespace(model_type="dinov2")}, "vllm", "vision tower 'dinov2' has no pruned class"),
        (
            {"vision_feature_layer": [-2, -5]},
            "vllm",
            r"vision_feature_layer must be one layer \(an int\), got \[-2, -5",
        ),
        ({"vision_feature_select_strategy": "full"}, "auto", "clip_vision_model must be 'default', got 'full'"),
        ({}, "terratorch", "model_impl must be one of 'auto', 'vllm', 'transformers', got 'terratorch'"),
    ],
)
def test_models_that_cannot_be_served(changes: dict[str, Any], chosen: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin.choose_implementation(llava(**changes), chosen)


def test_every_family_is_served_or_has_a_reason() -> None:
    """Of those with an adapter; one without a class in transformers cannot be loaded."""
    for row in families():
        if row["class"]:
            own, backend = row["class"] in plugin.ARCHITECTURES, row["class"] in plugin.BACKEND
            assert (own or backend) != (row["class"] in plugin.NOT_SERVED), row["class"]
            assert row["vllm"].startswith("class" if own else "backend" if backend else "no")


FIRST = "config.model.ModelConfig.get_model_arch_config"


def write_stand_in(root: Path) -> None:
    """A vLLM with nothing but what the plugin uses."""
    for module, wanted in interfaces.INTERFACES.items():
        lines: dict[str, list[str]] = {}
        for name, bracket, arguments in (one.partition("(") for one in wanted):
            owner, _, own = name.rpartition(".")
            line = f"def {own}({arguments}: ..." if bracket else f"{own} = None" if owner else f"class {own}: ..."
            lines.setdefault(owner, []).append(line)
        blocks = ["\n".join(lines.pop("", []))]
        blocks += [f"class {owner}:\n" + "\n".join(f"    {line}" for line in own) for owner, own in lines.items()]
        file = root / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(blocks))


def test_interfaces_that_fit(tmp_path: Path) -> None:
    write_stand_in(tmp_path)
    assert interfaces.changes(tmp_path) == []


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (
            "def get_model_arch_config(",
            "def get_arch_config(",
            "config.model.ModelConfig.get_model_arch_config is gone",
        ),
        ("class ModelConfig", "class Config", f"{FIRST} is gone"),
        ("def uses_mrope()", "def uses_mrope(self, other)", "config.model.ModelConfig.uses_mrope needs other"),
        ("def uses_mrope()", "def uses_mrope(self, *, other)", "config.model.ModelConfig.uses_mrope needs other"),
        ("def uses_mrope()", "def uses_mrope(self, other=None, *, more=1, **rest)", None),
        ("model_impl = None", "model_impl: str", None),
        ("model_impl = None", "impl = None", "config.model.ModelConfig.model_impl is gone"),
    ],
)
def test_interfaces_that_changed(tmp_path: Path, before: str, after: str, change: str | None) -> None:
    write_stand_in(tmp_path)
    file = tmp_path / "config" / "model.py"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    found = interfaces.changes(tmp_path)
    assert found[:1] == ([f"vllm.{change}"] if change else [])


def test_arguments_and_modules_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stand_in(tmp_path)
    (tmp_path / "renderers" / "online_renderer.py").unlink()
    file = tmp_path / "multimodal" / "registry.py"
    file.write_text(file.read_text().replace(", info, dummy_inputs", ", info, builder=None"))
    assert sorted(interfaces.changes(tmp_path)) == [
        "module vllm.renderers.online_renderer is gone",
        "vllm.multimodal.registry.MultiModalRegistry.register_processor takes no dummy_inputs",
    ]
    monkeypatch.setattr(interfaces, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    with pytest.raises(ValueError, match=r"^vLLM 0\.50 lacks what the plugin uses: .* \(tested: pip install vllm==0"):
        interfaces.check_interfaces("0.50")


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
def test_the_installed_vllm_fits() -> None:
    interfaces.check_interfaces("installed")


def test_one_line_says_what_is_pruned_to_what() -> None:
    assert plugin.describe(llava(), DivPrune(keep=64)) == "DivPrune(keep=64): 576 -> 64 visual tokens per image"
    assert "576 -> 144 visual" in plugin.describe(llava(), DivPrune(keep=0.25))
    tiled = llava(architectures=["LlavaOnevisionForConditionalGeneration"], image_grid_pinpoints=[[336, 336]])
    line = plugin.describe(tiled, DivPrune(keep=64))
    assert line == "DivPrune(keep=64): keeps 64 visual tokens of each image, which has 576 per crop"
    qwen = SimpleNamespace(architectures=["Qwen2_5_VLForConditionalGeneration"])
    assert plugin.describe(qwen, DivPrune(keep=64)) == "DivPrune(keep=64): keeps 64 visual tokens of each image"
    line = plugin.describe(qwen, DivPrune(keep=0.25))
    assert line == "DivPrune(keep=0.25): keeps 0.25 of the visual tokens of each image"


SERVED = ("clustrs", "divprune", "random", "fastervlm", "tome", "denoise", "mmr", "scope", "holov", "downsample")


@pytest.mark.parametrize("name", SERVED)
def test_an_image_that_became_nan_takes_its_k_places(name: str) -> None:
    """One image of a batch that overflowed in the tower must not stop the server: no error, k tokens, valid indices."""
    extra = {"inner": "divprune"} if name == "denoise" else {}
    method = plugin.read_method({"method": name, "keep": 5, **extra})
    rng = torch.Generator().manual_seed(0)
    tokens, scores = torch.randn(2, 16, 8, generator=rng), torch.rand(2, 16, generator=rng)
    tokens[1], scores[1] = torch.nan, torch.nan
    cell = torch.arange(16).expand(2, -1)
    layout = Layout(torch.zeros_like(cell), cell // 4, cell % 4)
    selection = method.select(tokens, scores, layout=layout, check=False)
    alone = method.select(tokens[:1], scores[:1], layout=Layout(cell[:1] * 0, cell[:1] // 4, cell[:1] % 4))
    assert selection.tokens.shape == (2, 5, 8)
    assert 0 <= int(selection.indices.min()) <= int(selection.indices.max()) < 16
    assert torch.equal(selection.indices[:1], alone.indices)
