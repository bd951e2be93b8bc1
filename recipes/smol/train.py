"""Train smol-llava's projector and LoRA on stored features. The tower is frozen, no visual token is left out.

    python -m recipes.smol.train PARTS FEATURES RUN [--until 01:30] [--stop STEP]

PARTS has the converted parts (`clustrs_models.smol_build`), FEATURES that of `recipes.smol.features`. Everything is
kept in RUN and the same command resumes; an empty RUN may begin with `--start FILE`, the weights in git.
With --until, the learning rate comes down to nothing before that time of day, and the run ends.

Stages: "align" brings projected tokens near the words for what they show, without the language model; "project"
trains the projector through the frozen language model; "full" trains the projector and LoRA.
"""

import argparse
import datetime
import json
import math
import os
import time
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.smol.data import Features, choose, generator_for, stack
from recipes.smol.model import Alignment, Packing, Projector, add_lora, answer_logits, answer_loss, exactly_right
from recipes.smol.names import caltech_kinds

SEED = 2027
STAGES = {"align": 300, "project": 20, "full": 100_000}
"""Steps of each stage."""
IMAGES = {"align": 8, "project": 2, "full": 2}
RATES = {"align": (2e-3, 0.0), "project": (1e-3, 0.0), "full": (5e-4, 1e-3)}
"""Learning rates of the projector and of LoRA."""
WARMUP = 20
ALIGNMENT = 0.2
"""Weight of the alignment loss while the language model is in the loop."""
EVERY_EVALUATION, EVERY_LOG, SAVE_SECONDS = 100, 10, 120.0
COOLDOWN_SECONDS = 2400.0


class Trainer:
    """Weights, optimizer and position of a run that can be stopped at any moment."""

    def __init__(
        self, parts: Path, features: Path, run: Path, start: Path | None = None, until: float = math.inf
    ) -> None:
        torch.manual_seed(SEED)
        run.mkdir(parents=True, exist_ok=True)
        self.run, self.until = run, until
        self.images, self.held = Features(features / "train"), Features(features / "held")
        self.packing = Packing(AutoTokenizer.from_pretrained(parts / "lm"))
        self.before = torch.tensor(self.packing.before)
        self.language = AutoModelForCausalLM.from_pretrained(parts / "lm", dtype=torch.bfloat16).eval()
        self.language.requires_grad_(False)
        self.language.set_attn_implementation("plain")
        embeddings = self.language.get_input_embeddings().weight
        self.lora = nn.ModuleDict({name.replace(".", "/"): part for name, part in add_lora(self.language).items()})
        self.projector = Projector()
        self.projector.standardize(stack(self.images, 100), float(embeddings.float().norm(dim=-1).mean()))
        names = sorted({kind.name for kind in caltech_kinds()} | {"cat", "dog"})
        self.alignment = Alignment(embeddings, names, self.packing)
        self.weights: dict[str, nn.Parameter] = {
            **{f"projector.{name}": value for name, value in self.projector.named_parameters()},
            **{f"alignment.{name}": value for name, value in self.alignment.named_parameters()},
            **{
                f"lora.{name.replace('/', '.')}": value
                for name, value in self.lora.named_parameters()
                if value.requires_grad
            },
        }
        groups = [
            {"params": [value for name, value in self.weights.items() if not name.startswith("lora.")]},
            {"params": [value for name, value in self.weights.items() if name.startswith("lora.")]},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
        self.step, self.passes, self.since = 0, 0, 0
        self.restore(start)

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoint.safetensors"

    def save(self) -> None:
        """Write weights and moments, and the weights alone in float16 as they go into git."""
        tensors = {name: value.detach() for name, value in self.weights.items()}
        tensors |= {"projector.mean": self.projector.mean, "projector.std": self.projector.std}
        state = {"step": str(self.step), "passes": str(self.passes)}
        half = {name: value.half().contiguous() for name, value in tensors.items()}
        for name, value in self.weights.items():
            moments = self.optimizer.state.get(value, {})
            tensors |= {f"{name}|{key}": moments[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in moments}
        whole = {name: value.contiguous() for name, value in tensors.items()}
        for path, content in ((self.checkpoint, whole), (self.run / "smol.safetensors", half)):
            save_file(content, path.with_suffix(".partial"), state)
            os.replace(path.with_suffix(".partial"), path)

    def restore(self, start: Path | None) -> None:
        """Continue from RUN's checkpoint, or from weights alone."""
        path = self.checkpoint if self.checkpoint.exists() else start
        if path is None:
            return
        with safe_open(path, "pt") as file:
            self.step, self.passes = int(file.metadata()["step"]), int(file.metadata()["passes"])
        stored = load_file(path)
        with torch.no_grad():
            self.projector.mean.copy_(stored["projector.mean"])
            self.projector.std.copy_(stored["projector.std"])
            for name, value in self.weights.items():
                value.copy_(stored[name])
                if f"{name}|step" in stored:
                    keys = ("exp_avg", "exp_avg_sq", "step")
                    self.optimizer.state[value] = {key: stored[f"{name}|{key}"].clone() for key in keys}
        log = self.run / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= self.step))

    def stage(self) -> tuple[str, int]:
        """Return the stage of the present step and the steps done in it."""
        first = 0
        for name, steps in STAGES.items():
            if self.step < first + steps:
                return name, self.step - first
            first += steps
        raise SystemExit("all stages are done")

    def rates(self, stage: str, done: int) -> tuple[float, float]:
        """Return the learning rates: a short warm-up of each stage and each run, the way down before `until`."""
        factor = min(1.0, (done + 1) / WARMUP, (self.since + 1) / WARMUP)
        if stage != "align":
            factor *= max(0.0, min(1.0, (self.until - time.time()) / COOLDOWN_SECONDS))
        return RATES[stage][0] * factor, RATES[stage][1] * factor

    def image(self, stage: str, number: int, key: tuple[int, ...], count: int) -> tuple[float, dict[str, float]]:
        """Add one image's gradients; return its loss and the shares that are right."""
        features, names, questions = self.images[number]
        visual = self.projector(features.float())
        aligned, named = self.alignment(visual, names)
        report = {"align": aligned.item(), "named": named}
        if stage == "align":
            (aligned / count).backward()
            return aligned.item(), report
        packed = self.packing(choose(questions, names, generator_for(*key)), len(visual))
        logits = answer_logits(self.language, self.before, visual, packed)
        answers = answer_loss(logits, packed)
        ((answers + ALIGNMENT * aligned) / count).backward()
        right = exactly_right(logits, packed)
        return answers.item(), report | {"right": sum(right) / len(right)}

    def train_step(self) -> dict[str, float]:
        """Run one optimizer step; return the means to log."""
        stage, done = self.stage()
        for group, rate in zip(self.optimizer.param_groups, self.rates(stage, done), strict=True):
            group["lr"] = rate
        for value in self.lora.parameters():
            if not isinstance(value, nn.Parameter) or value.dtype != torch.float32:
                continue
            value.requires_grad_(stage == "full")
        count = IMAGES[stage]
        chances = self.images.chances()
        chosen = generator_for(SEED, 1, self.step).choice(len(chances), count, replace=False, p=chances)
        sums: dict[str, list[float]] = defaultdict(list)
        for i, number in enumerate(chosen):
            loss, report = self.image(stage, int(number), (SEED, 2, self.step, i), count)
            for key, number_ in {"loss": loss, **report}.items():
                if not math.isnan(number_):
                    sums[key].append(number_)
        nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.since += 1
        self.passes += count if stage != "align" else 0
        return {key: sum(values) / len(values) for key, values in sums.items()}

    @torch.no_grad()
    def evaluate(self, first: int = 0, count: int = 30, gray: Tensor | None = None) -> dict[str, float]:
        """Return the share of questions about held-back photographs that greedy decoding answers exactly, by kind."""
        found: dict[str, list[bool]] = defaultdict(list)
        for number in range(first, min(first + count, len(self.held))):
            features, names, questions = self.held[number]
            visual = self.projector((features if gray is None else gray).float())
            asked = choose(questions, names, generator_for(SEED, 3, number))
            packed = self.packing(asked, len(visual))
            logits = answer_logits(self.language, self.before, visual, packed)
            for question, right in zip(asked, exactly_right(logits, packed), strict=True):
                found["scene" if question.kind.startswith("scene") else question.kind].append(right)
        return {kind: round(sum(rights) / len(rights), 3) for kind, rights in sorted(found.items())}

    def log(self, row: dict[str, object]) -> None:
        with (self.run / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def train(self, stop: int) -> None:
        """Run until step `stop`, or until the time of day that was given."""
        saved = time.monotonic()
        sums: dict[str, list[float]] = defaultdict(list)
        while self.step < stop and time.time() < self.until:
            stage, _ = self.stage()
            started, cpu = time.monotonic(), time.process_time()
            for key, value in self.train_step().items():
                sums[key].append(value)
            sums["seconds"].append(time.monotonic() - started)
            sums["cpu"].append(time.process_time() - cpu)
            if self.step % (EVERY_LOG if stage != "align" else 25) == 0:
                self.images.refresh()
                means = {key: round(sum(values) / len(values), 4) for key, values in sums.items()}
                clock = time.strftime("%H:%M:%S")
                rate = self.optimizer.param_groups[0]["lr"]
                row = {"step": self.step, "stage": stage, "time": clock, "rate": rate, "images": len(self.images)}
                self.log(row | {"passes": self.passes} | means)
                sums.clear()
            if stage != "align" and self.step % EVERY_EVALUATION == 0:
                self.held.refresh()
                self.log({"step": self.step, "time": time.strftime("%H:%M:%S"), "held": self.evaluate()})
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()
        self.log({"step": self.step, "time": time.strftime("%H:%M:%S"), "held": self.evaluate(count=160)})


def time_of_day(text: str) -> float:
    """Return the next time the clock shows HH:MM, in seconds since the epoch."""
    hour, minute = map(int, text.split(":"))
    now = datetime.datetime.now()
    then = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (then if then > now else then + datetime.timedelta(days=1)).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("features", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--start", type=Path, metavar="FILE", help="weights to begin with when RUN is empty")
    parser.add_argument("--until", type=time_of_day, default=math.inf, metavar="HH:MM")
    parser.add_argument("--stop", type=int, default=sum(STAGES.values()), metavar="STEP")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Trainer(options.parts, options.features, options.run, options.start, options.until).train(options.stop)


if __name__ == "__main__":
    main()
