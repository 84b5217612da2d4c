"""What tritonserver's log says about why it does not run: one line out of a wall of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LONGEST = 600  # characters of a reason; the log has the rest


@dataclass(frozen=True, slots=True)
class Failure:
    """``reason`` in one line; ``where`` is the innermost line of a model's own code, if it raised.

    ``others``: models that failed as well.
    """

    reason: str
    where: str | None = None
    others: tuple[str, ...] = ()


_LOAD = re.compile(r"failed to load '([^']+)' version \d+: [A-Z][a-z ]+: ")
_TRACEBACK = re.compile(r"\n\s*At:\n")
_FRAME = re.compile(r"(/\S+\.py)\((\d+)\): (\S+)")
_NEXT_LINE = re.compile(r"^(?:[IWEF]\d{4} |\d{4}-\d\d-\d\dT\S+ [IWEF] |\+-)", re.M)
_CONSEQUENCE = re.compile(r"depends on '[^']+' which has no loaded version")
_UNREADABLE = re.compile(r"Poll failed for model directory '([^']+)': (.*?)\"?$", re.M)
_PARSER = re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)$", re.M)
_LIBRARY = re.compile(r"(\S+): error while loading shared libraries: (.*)$", re.M)
_ENSEMBLE = re.compile(r"(ensemble \S+ contains models that are not available.*?)\"?$", re.M)
_SERVICE = re.compile(r"failed to start (\w+ service: .*?)\s*\"?$", re.M)
_OPTION = re.compile(r"tritonserver: (.*option .*)$", re.M)
_ERROR = re.compile(r"^(?:error: |E\d{4} .*?\] |\d{4}-\d\d-\d\dT\S+ E .*?\] )(.*)$", re.M)
_NOISE = ("CudaDriverHelper has not been initialized", "failed to load all models")


def find_failure(log: str) -> Failure | None:
    """Why the server will not come up, as soon as its log says so; None while nothing in it is fatal."""
    library = _LIBRARY.search(log)
    if library:  # tritonserver itself does not notice and waits for that program for ever
        return Failure(f"{library[1].rpartition('/')[2]} cannot start: {_one_line(library[2])}")
    unreadable = _UNREADABLE.search(log)
    if unreadable:
        parser = _PARSER.search(log)
        why = f"config.pbtxt, line {parser[1]}" if parser else unreadable[2]
        return Failure(f"model {unreadable[1]!r} failed to load: {_one_line(why)}")
    failed = _failed_models(log)
    if failed:
        causes = [name for name, message in failed.items() if not _CONSEQUENCE.search(message)] or list(failed)
        message, *traceback = _TRACEBACK.split(failed[causes[0]], maxsplit=1)
        frame = _FRAME.search(traceback[0]) if traceback else None
        return Failure(
            f"model {causes[0]!r} failed to load: {_one_line(message)}",
            f"{frame[1]}:{frame[2]} ({frame[3]})" if frame else None,
            tuple(name for name in failed if name != causes[0]),
        )
    for pattern in (_ENSEMBLE, _SERVICE, _OPTION):
        match = pattern.search(log)
        if match:
            return Failure(_one_line(match[1]))
    return None


def last_error(log: str) -> str | None:
    """The last line that reports an error: the best guess when ``find_failure`` knows nothing."""
    errors = [match[1] for match in _ERROR.finditer(log) if not any(noise in match[1] for noise in _NOISE)]
    return _one_line(errors[-1].strip('"')) if errors else None


def _failed_models(log: str) -> dict[str, str]:
    """Each failed model's message and traceback, in the order of the log."""
    failed: dict[str, str] = {}
    for start in _LOAD.finditer(log):
        line = log[start.end() :].partition("\n")[0]
        if line.endswith('"'):  # one quoted line, escaped: Triton 24.06 and later
            message = line[:-1].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
        else:
            following = _NEXT_LINE.search(log, start.end())
            message = log[start.end() : following.start() if following else None]
        failed.setdefault(start[1], message)
    return failed


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
