"""Running a stage of the training for so many minutes, resumably, with a line or a bar that says how far it is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_REPORT_SECONDS = 10.0


class Stage(Protocol):
    """Something that is trained step by step."""

    name: str

    def step(self, progress: float) -> None:
        """One step; ``progress`` is the share of the stage's time that is over."""

    def figures(self) -> dict[str, float]:
        """How the last step was. Reads the device."""

    def sheet(self, file: Path) -> None:
        """Write a picture of what it can do by now."""

    def finish(self) -> None:
        """Make the weights what they are to be used as; called once, after the last step."""

    def state(self, done: bool) -> dict[str, Any]:
        """What ``load`` needs; once it is done, to be used alone."""

    def load(self, state: dict[str, Any]) -> None: ...


class Loop:
    """``folder`` keeps a file a stage: its state, and whether it is done. ``save_minutes``: how often it is written."""

    def __init__(self, folder: Path, device: torch.device, console: Console, save_minutes: float) -> None:
        self._folder = folder
        self._device = device
        self._console = console
        self._save_seconds = 60 * save_minutes
        self._log = folder / "train.log"

    def run(self, stage: Stage, minutes: float) -> float:
        """Run ``stage`` for ``minutes`` in all, what was done before an interruption counted in; → minutes it had."""
        budget = 60 * minutes
        spent, steps, done = self._restore(stage)
        if done:
            self.say(f"{stage.name}: done before, {steps} steps in {spent:.0f} s")
            return spent / 60
        began = time.monotonic() - spent
        reported, saved = time.monotonic(), time.monotonic()
        with self._bar() as bar:
            task = bar.add_task(stage.name, total=budget, completed=int(spent), figures="")
            while (spent := time.monotonic() - began) < budget or steps == 0:
                stage.step(min(1.0, spent / budget))
                steps += 1
                now = time.monotonic()
                if now - reported > _REPORT_SECONDS or steps == 1:
                    reported = now
                    figures = "  ".join(f"{name} {value:.4g}" for name, value in stage.figures().items())
                    bar.update(task, completed=spent, figures=f"step {steps}  {figures}")
                    self._write(f"{stage.name} {spent:.0f} s  step {steps}  {figures}", show=bar.disable)
                if now - saved > self._save_seconds:
                    self._save(stage, spent, steps, done=False)
                    stage.sheet(self._folder / f"{stage.name}.png")
                    saved = time.monotonic()
        stage.finish()
        stage.sheet(self._folder / f"{stage.name}.png")
        self._save(stage, spent, steps, done=True)
        self.say(f"{stage.name}: {steps} steps in {time.monotonic() - began:.0f} s")
        return spent / 60

    def say(self, text: str) -> None:
        self._write(text, show=True)

    def _write(self, text: str, show: bool) -> None:
        with self._log.open("a") as log:
            log.write(text + "\n")
        if show:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _bar(self) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        return Progress(*columns, console=self._console, disable=not self._console.is_terminal)

    def _file(self, stage: Stage) -> Path:
        return self._folder / f"{stage.name}.pt"

    def _restore(self, stage: Stage) -> tuple[float, int, bool]:
        """Seconds and steps behind it, and whether it is done."""
        file = self._file(stage)
        if not file.exists():
            return 0.0, 0, False
        stored = torch.load(file, map_location=self._device, weights_only=True)
        stage.load(stored["stage"])
        return stored["seconds"], stored["steps"], stored["done"]

    def _save(self, stage: Stage, seconds: float, steps: int, done: bool) -> None:
        """Whole or not at all: an interrupted save leaves the one before."""
        file = self._file(stage)
        temporary = file.with_suffix(".tmp")
        torch.save({"stage": stage.state(done), "seconds": seconds, "steps": steps, "done": done}, temporary)
        os.replace(temporary, file)
