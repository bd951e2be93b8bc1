"""A training run that can be stopped at any moment and resumes where it was: checkpoints, schedule, log."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.data import Stage

Step = Callable[[Stage, dict[str, Tensor]], tuple[Tensor, dict[str, float]]]
SAVE_EVERY = 120.0
"""Seconds between two checkpoints."""


@dataclass(frozen=True)
class Schedule:
    """Of the learning rate, in steps. It comes down to almost nothing before each of the `rests` and at the end."""

    rate: float
    warmup: int
    horizon: int
    cooldown: int
    total: int
    rests: tuple[int, ...] = ()


class Run:
    """The parameters of `parts`, AdamW over them, and where the run stands. Everything is kept in `folder`."""

    def __init__(self, folder: Path, parts: dict[str, nn.Module], schedule: Schedule, decay: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.parameters = {
            f"{part}.{name}": value
            for part, module in parts.items()
            for name, value in module.named_parameters()
            if value.requires_grad
        }
        groups = [
            {"params": [p for p in self.parameters.values() if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in self.parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.98), eps=1e-8)
        self.schedule = schedule
        self.step, self.seconds, self.stage_begin = 0, 0.0, 0
        self.restore()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def save(self) -> None:
        tensors: dict[str, Tensor] = dict(self.parameters)
        for name, parameter in self.parameters.items():
            state = self.optimiser.state.get(parameter, {})
            tensors |= {f"{name}|{key}": state[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in state}
        tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        partial = self.checkpoint.with_suffix(".partial")
        save_file(tensors, partial, {"step": str(self.step), "seconds": repr(self.seconds)})
        os.replace(partial, self.checkpoint)

    def restore(self) -> None:
        if not self.checkpoint.exists():
            return
        with safe_open(self.checkpoint, "pt") as stored:
            self.step, self.seconds = int(stored.metadata()["step"]), float(stored.metadata()["seconds"])
            names = set(stored.keys())
            for name, parameter in self.parameters.items():
                if name not in names:  # of a part that a later stage adds
                    continue
                parameter.data.copy_(stored.get_tensor(name))
                if f"{name}|exp_avg" in names:
                    moments = {key: stored.get_tensor(f"{name}|{key}") for key in ("exp_avg", "exp_avg_sq")}
                    own = (
                        stored.get_tensor(f"{name}|step") if f"{name}|step" in names else torch.tensor(float(self.step))
                    )
                    self.optimiser.state[parameter] = {"step": own, **moments}
        log = self.folder / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= self.step))

    def learning_rate(self, stage: Stage) -> float:
        """Linear warm-up of the run and of the stage, a cosine that reaches a twentieth at the horizon (or the stage's
        own rate), and a linear way down before each rest."""
        plan = self.schedule
        if self.step < plan.warmup:
            return plan.rate * (self.step + 1) / plan.warmup
        progress = min(1.0, (self.step - plan.warmup) / (plan.horizon - plan.warmup))
        rate = stage.rate or plan.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        if stage.warmup:
            rate *= min(1.0, (self.step - self.stage_begin + 1) / stage.warmup)
        left = next((rest - self.step for rest in (*plan.rests, plan.total) if rest > self.step), 0)
        return rate * min(1.0, max(0.02, left / plan.cooldown))

    def stages(
        self, stages: Iterable[Stage], data: Callable[[int, Stage, int], Iterable[dict[str, Tensor]]], step: Step
    ) -> None:
        """Run what is left of the stages. `data(number, stage, first)` gives the batches of a stage from one on."""
        begin = 0
        for number, stage in enumerate(stages):
            self.stage_begin = begin
            if self.step < begin + stage.steps:
                self.stage(number, stage, data(number, stage, self.step - begin), step)
            begin += stage.steps
        self.save()

    def stage(self, number: int, stage: Stage, batches: Iterable[dict[str, Tensor]], step: Step) -> None:
        started, saved = time.monotonic() - self.seconds, time.monotonic()
        sums: dict[str, list[float]] = {}
        for batch in batches:
            for group in self.optimiser.param_groups:
                group["lr"] = self.learning_rate(stage)
            value, report = step(stage, batch)
            self.optimiser.zero_grad(set_to_none=True)
            value.backward()
            nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
            self.optimiser.step()
            self.step += 1
            self.seconds = time.monotonic() - started
            for key, number_ in {"loss": value.item(), **report}.items():
                if not math.isnan(number_):
                    sums.setdefault(key, []).append(number_)
            if self.step % 25 == 0:
                self.log(number, stage, {key: sum(values) / len(values) for key, values in sums.items()})
                sums = {}
            if time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()

    def log(self, number: int, stage: Stage, means: dict[str, float]) -> None:
        row = {
            "step": self.step,
            "stage": number,
            "side": max(stage.sides),
            "seconds": round(self.seconds),
            "rate": self.learning_rate(stage),
        }
        row |= {key: round(value, 4) for key, value in means.items()}
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(f"{self.step}/{self.schedule.total} " + " ".join(f"{k} {v:.3f}" for k, v in means.items()), flush=True)
