"""What the trainings share: rates, a running mean of the weights, checkpoints, and the loop."""

from __future__ import annotations

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model import Mini
from torch import Tensor


class Training(ABC):
    """Model, optimiser, running mean of the weights, and step count: what a checkpoint holds.

    Args:
        model: Its parameters that have gradients are trained.
        groups: Parameters for AdamW, with their rates.
        options: The command line, of which this reads ``steps``, ``decay`` and ``mean``.
        warm_up: Steps in which rates rise.
    """

    def __init__(
        self,
        model: Mini,
        groups: Sequence[dict[str, Any]],
        options: argparse.Namespace,
        warm_up: int = 40,
    ) -> None:
        self.model, self.options, self.warm_up = model, options, warm_up
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        self.rates = [group["lr"] for group in groups]
        self.mean = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        self.step = 0

    @abstractmethod
    def objective(self) -> tuple[Tensor, dict[str, float]]:
        """The loss of this step's batch, and its parts for the log."""

    def clip(self) -> None:
        """Limit the gradients."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, 2.0)

    def update(self) -> dict[str, float]:
        """One step of the optimiser; the parts of the loss.

        Rates rise in the warm-up, stay, and fall in the last part of the run (``decay``).
        """
        share = self.step / self.options.steps
        factor = min(1.0, (self.step + 1) / self.warm_up)
        factor *= min(1.0, 0.03 + (1 - share) / self.options.decay)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.model.train()
        total, parts = self.objective()
        self.optimizer.zero_grad()
        total.backward()
        self.clip()
        self.optimizer.step()
        self.step += 1
        share_of_old = min(self.options.mean, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.mean:
                    self.mean[name].lerp_(parameter, 1 - share_of_old)
        return parts

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is complete."""
        state = {
            "trained": {n: p.detach() for n, p in self.model.named_parameters() if n in self.mean},
            "optimizer": self.optimizer.state_dict(),
            "mean": self.mean,
            "step": self.step,
            # Of dropout.
            "random": torch.get_rng_state(),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["trained"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.mean, self.step = state["mean"], state["step"]
        torch.set_rng_state(state["random"])

    def run(self, folder: Path) -> None:
        """Go on from the folder's checkpoint, if there is one, to the last step.

        Losses are printed, and written to ``log.jsonl``.
        """
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            self.load(checkpoint)
            print(f"going on from step {self.step}", flush=True)
        started = time.monotonic()
        recent: list[dict[str, float]] = []
        with (folder / "log.jsonl").open("a", encoding="utf-8", buffering=1) as log:
            while self.step < self.options.steps:
                recent.append(self.update())
                if self.step % 10 == 0:
                    mean = {
                        name: round(sum(parts[name] for parts in recent) / len(recent), 4)
                        for name in recent[0]
                    }
                    minutes = round((time.monotonic() - started) / 60, 1)
                    line = json.dumps({"step": self.step, "minutes": minutes, **mean})
                    print(line, flush=True)
                    log.write(line + "\n")
                    recent = []
                if self.step % self.options.save_every == 0:
                    self.save(checkpoint)
        self.save(checkpoint)
