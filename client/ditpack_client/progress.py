"""What happens to each image: a live board on a terminal, one line an image elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ditpack_client.events import Event, Queued, Retrying, Step

_BAR_CHARACTERS = 20


class Board:
    """One row an image: its place in the queue, a bar of its steps, then how it ended.

    ``footer`` gives a last line, read at every refresh. Where the console is no terminal, or a dumb one, it prints the
    images that were made, as they are, and nothing else.
    """

    def __init__(self, console: Console, labels: Sequence[str], footer: Callable[[], str] | None = None) -> None:
        self._console = console
        self._labels = labels
        self._footer = footer
        self._latest: dict[int, Event] = {}
        self._ended: dict[int, Text] = {}
        self._started = time.monotonic()
        self.moves = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5) if self.moves else None

    def update(self, index: int, event: Event) -> None:
        if isinstance(event, Queued | Step | Retrying):
            self._latest[index] = event

    def done(self, index: int, text: str) -> None:
        self._ended[index] = Text.assemble(("done", "green"), f"    {text}")
        if self._live is None:
            self._console.print(Text(f"{text}  {self._labels[index]}"), soft_wrap=True)

    def failed(self, index: int, text: str) -> None:
        self._ended[index] = Text.assemble(("failed", "red"), f"  {text}")

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=48)
        table.add_column(overflow="fold")
        for index, label in enumerate(self._labels):
            table.add_row(Text(label), self._ended.get(index) or self._state(self._latest.get(index)))
        return Group(table, Text(self._footer(), style="cyan")) if self._footer is not None else table

    def _state(self, event: Event | None) -> RenderableType:
        match event:
            case Step(_, step, steps, seconds, remaining):
                row = Table.grid(padding=(0, 2))
                left = f"{_left(remaining)} left" if step < steps else "decoding"
                told = Text(f"step {step:>{len(str(steps))}} of {steps}  {milliseconds(1000 * seconds)} a step  {left}")
                row.add_row(ProgressBar(steps, step, width=_BAR_CHARACTERS), told)
                return row
            case Retrying():
                return Text(retry_text(event), style="yellow")
            case Queued(_, int(position)):
                return Text(f"queued  number {position} in the queue", style="dim")
        word = "queued" if event else "sent  "  # queued without a place: encoding, or outside the engine
        return Text(f"{word}  {time.monotonic() - self._started:.1f} s", style="dim")

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def retry_text(retrying: Retrying) -> str:
    """ "full: 4 requests wait; trying again in 1.4 s": the server's reason, and what is done about it."""
    return f"{retrying.reason}; trying again in {retrying.seconds:.1f} s"


def milliseconds(value: float) -> str:
    """A duration as people write it: "12 ms", "3.4 s"."""
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s"


def _left(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
