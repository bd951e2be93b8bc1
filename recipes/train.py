"""Train the embedded models from scratch.

    python -m recipes.train llava encoder       the vision tower, by itself
    python -m recipes.train llava language      projector and language model, with that tower as it is
    python -m recipes.train llava export        put the result where the package ships it

and the same for `onevision`, which starts from what `llava` has learnt.

Stop it at any moment: the same command resumes from the last checkpoint. All settings are in `recipes/settings.toml`.
"""

import argparse
import tomllib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from recipes import language, models, tower
from recipes.data import Images, Stage, batches
from recipes.running import Run, Schedule

SETTINGS = Path(__file__).with_name("settings.toml")
SHIPPED = Path(__file__).parents[1] / "packages" / "clustrs-models" / "src" / "clustrs_models"
NAMES = {"llava": "mini-llava", "onevision": "mini-onevision"}


def stages(settings: dict[str, Any]) -> list[Stage]:
    return [Stage(**{**s, "sides": tuple(s["sides"]), "images": tuple(s["images"])}) for s in settings["stages"]]


def start(folder: Path, parts: dict[str, nn.Module], own: dict[str, Any]) -> Run:
    total = sum(stage.steps for stage in stages(own))
    schedule = Schedule(own["rate"], own["warmup"], own["horizon"], own["cooldown"], total, tuple(own.get("rests", ())))
    return Run(folder, parts, schedule, own["decay"])


def trained(module: nn.Module, checkpoint: Path, part: str) -> None:
    """Fill a module with what a run has learnt."""
    if not checkpoint.exists():
        raise SystemExit(f"{checkpoint} is not there: train that part first (python -m recipes.train --help)")
    with safe_open(checkpoint, "pt") as stored:
        there = set(stored.keys())
        for name, parameter in module.named_parameters():
            if f"{part}.{name}" in there:
                parameter.data.copy_(stored.get_tensor(f"{part}.{name}"))
            elif not name.endswith("_proj.bias"):  # Qwen2 has biases that Llama has not
                raise SystemExit(f"{checkpoint} has no {part}.{name}: it is of another model")


def train_encoder(settings: dict[str, Any], family: str, folder: Path) -> None:
    own = settings[family]["encoder"]
    torch.manual_seed(settings["seed"])
    vision, heads = getattr(models, family)(settings[family]).model.vision_tower, tower.Heads(own["width"])
    encoder: tower.Clip | tower.Siglip
    if family == "llava":
        encoder = tower.Clip(vision)
    else:
        encoder = tower.Siglip(vision)
        clip, done = (
            models.llava(settings["llava"]).model.vision_tower,
            folder / "llava-encoder" / "checkpoint.safetensors",
        )
        trained(clip, done, "tower")
        trained(heads, done, "heads")
        encoder.start_from(clip, Images(settings, "llava", 0, Stage((192,), (16,), 1))[0]["pixels"])
    start(folder / f"{family}-encoder", {"tower": encoder.tower, "heads": heads}, own).stages(
        stages(own),
        lambda number, stage, first: batches(Images(settings, family, number, stage), first),
        lambda stage, batch: tower.loss(encoder, heads, batch, stage.spreading),
    )


class Newline(nn.Module):
    """OneVision's one parameter that belongs to no layer."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.image_newline = parameter


def parts(model: Any) -> dict[str, nn.Module]:
    inner = model.model
    found = {"projector": inner.multi_modal_projector, "language": inner.language_model, "head": model.lm_head}
    return found | ({"newline": Newline(inner.image_newline)} if hasattr(inner, "image_newline") else {})


def train_language(settings: dict[str, Any], family: str, folder: Path) -> None:
    own = settings[family]["language"]
    torch.manual_seed(settings["seed"])
    model = getattr(models, family)(settings[family])
    trained(model.model.vision_tower, folder / f"{family}-encoder" / "checkpoint.safetensors", "tower")
    model.model.vision_tower.requires_grad_(False)
    vision = model.model.vision_tower
    encoder = tower.Clip(vision, fresh=False) if family == "llava" else tower.Siglip(vision)
    if family == "llava":
        some = Images(settings, family, 0, Stage(stages(own)[0].sides[:1], (16,), 1))[0]
        with torch.no_grad():
            language.initialize(model, encoder.features(some["pixels"], some["corner"]).std().item())
    else:
        for name, part in parts(model).items():
            if name != "newline":
                trained(part, folder / "llava-language" / "checkpoint.safetensors", name)
    words = models.vocabulary()
    asking = language.Asking(model, encoder, words)
    start(folder / f"{family}-language", parts(model), own).stages(
        stages(own),
        lambda number, stage, first: batches(Images(settings, family, number, stage, words), first),
        lambda _, batch: language.loss(asking, batch),
    )


def export(settings: dict[str, Any], family: str, folder: Path) -> None:
    model = getattr(models, family)(settings[family])
    trained(model.model.vision_tower, folder / f"{family}-encoder" / "checkpoint.safetensors", "tower")
    for name, part in parts(model).items():
        trained(part, folder / f"{family}-language" / "checkpoint.safetensors", name)
    models.save(model, getattr(models, f"{family}_processor")(settings[family]), SHIPPED / NAMES[family])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=tuple(NAMES))
    parser.add_argument("part", choices=("encoder", "language", "export"))
    parser.add_argument("--folder", type=Path, default=Path("build/train"), help="for checkpoints and logs")
    options = parser.parse_args()
    settings = tomllib.loads(SETTINGS.read_text())
    {"encoder": train_encoder, "language": train_language, "export": export}[options.part](
        settings, options.family, options.folder
    )


if __name__ == "__main__":
    main()
