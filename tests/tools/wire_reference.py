"""docs/wire.md, made of the resolvers' tables of fields and of the config.pbtxt of the models that clients call.

python tests/tools/wire_reference.py    writes it again; tests/unit/test_docs.py fails while it is another
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from ditpack import reference_images, request
from ditpack.fields import Field, Fields
from ditpack.models import mammoth_request

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "wire.md"

# Model → how it is introduced, the fields that its resolver reads.
MODELS: dict[str, tuple[str, Fields]] = {
    "qwen_image": ("Text to image.", request.FIELDS),
    "qwen_image_edit": (
        "Images and a prompt to image, with a checkpoint that edits.",
        {**reference_images.FIELDS, **request.FIELDS},
    ),
    "mammoth_moda2": (
        "An answer of MammothModa2's autoregressive stage to its image. A setting counts from the first of: "
        "`EXTRA_ARGS`, its own input, `ADDITIONAL_INFORMATION`, the default.",
        {**mammoth_request.STATES, **mammoth_request.FIELDS},
    ),
    "qwen_image_stream": (
        "`qwen_image` with events while the image is made, over `/generate_stream` or a gRPC stream; it ends with the "
        "image or an error. `EVENT` is `queued` (with `id`, then with the `position` in the engine's queue), `step` "
        "(`step`, `steps`, `seconds_per_step`, `remaining_s`), `preview` (`step`, `steps`) or `image`. `control` "
        f"cancels by that `id`: the request's own, if it has at least {request.SHORTEST_ID} characters, else a drawn "
        "one. `OUTPUT_FORMAT` `raw` is refused.",
        request.STREAM_FIELDS,
    ),
    "control": (
        "Cancel a request by its id, over whatever protocol it came; ask how the engines are.",
        request.CONTROL_FIELDS,
    ),
}

HEAD = """\
# The wire

<!-- Made by tests/tools/wire_reference.py of the resolvers' own tables; change those, then run it. -->

One Triton request makes one image. The models below have no batch dimension: send plain tensors of the shapes given;
Triton batches by itself. Over HTTP that is `/v2/models/MODEL/infer` or `/generate` (JSON: ask for `RESPONSE_FORMAT`
`b64_json`), over gRPC `ModelInfer`. The numbers in brackets are defaults that `config.pbtxt` may change.

Of Triton's request parameters `timeout` counts: the most microseconds that a request may wait for its first step
(`queue_timeout_s` is the longest). `priority` does not: there is the input `PRIORITY`.

Errors say what to do. `INVALID_ARG` is bad input: the field, its value, what is allowed. `UNAVAILABLE` means full or
stopping: retry later. `CANCELLED` means that the deadline passed, the client went away, or `control` was asked to.
Everything else is `INTERNAL`. gRPC has these as status codes. Over HTTP `/infer` answers 400, or 503 for `UNAVAILABLE`,
and Triton 2.51's `/generate` 400 to all, so go by the words; [troubleshooting.md](troubleshooting.md) has them.
"""


def wire_reference() -> str:
    return "\n".join([HEAD, *(_model(name, about, fields) for name, (about, fields) in MODELS.items())])


def _model(name: str, about: str, fields: Fields) -> str:
    source = (ROOT / "model_repository" / name / "config.pbtxt").read_text()
    config = text_format.Parse(source, model_config_pb2.ModelConfig())
    tensors = {tensor.name: tensor for tensor in config.input}
    if set(tensors) != set(fields):
        raise ValueError(f"{name}: its config.pbtxt and its resolver differ in {set(tensors) ^ set(fields)}")
    lines = [f"## {name}", "", about, "", "| input | type | when not sent | allowed |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{key}` | {_type(tensors[key])} | {_unsent(field)} | {_allowed(field)} |" for key, field in fields.items()
    ]
    lines += ["", "| output | type | |", "| --- | --- | --- |"]
    comments = _comments(source)
    lines += [f"| `{tensor.name}` | {_type(tensor)} | {comments[tensor.name]} |" for tensor in config.output]
    return "\n".join([*lines, ""])


def _type(tensor: Any) -> str:
    name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return f"{name} `[{', '.join('n' if size == -1 else str(size) for size in tensor.dims)}]`"


def _unsent(field: Field) -> str:
    if field.unsent or field.default is None:
        return field.unsent
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    return ", ".join(f'`"{value}"`' if value == " " else f"`{value}`" for value in values)


def _allowed(field: Field) -> str:
    rule = field.allowed.removeprefix("must be ")
    if field.choices:
        rule = ", ".join(f"`{choice}`" for choice in field.choices)
    elif field.high is not None:
        rule = f"{field.low} … {field.high}"
    return "; ".join(part for part in (rule, field.about) if part)


def _comments(source: str) -> dict[str, str]:
    """The comment above each output; those without one share the comment above them."""
    found: dict[str, str] = {}
    comment: list[str] = []
    ended = True
    for line in source.partition("\noutput [")[2].partition("\n]")[0].splitlines():
        if line.strip().startswith("#"):
            comment = [*([] if ended else comment), line.strip().removeprefix("#").strip()]
            ended = False
        elif name := re.search(r'name: "(\w+)"', line):
            found[name[1]] = " ".join(comment).replace("|", "\\|")
            ended = True
    return found


if __name__ == "__main__":
    FILE.write_text(wire_reference())
