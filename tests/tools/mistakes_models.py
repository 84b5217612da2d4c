"""Mistakes in one model's files: its config's syntax, then what it says, then its model.py."""

from __future__ import annotations

from collections.abc import Callable

from mistakes import ENSEMBLE, Mistake, Says, append, swap, swap_first


def batching(*lines: str) -> Callable[[str], str]:
    """These lines in dit's dynamic_batching."""
    return swap("dynamic_batching { }", "\n  ".join(("dynamic_batching {", *lines)) + "\n}")


SYNTAX = [
    Mistake(
        "unknown field",
        ENSEMBLE,
        swap("max_batch_size: 0", "max_batch: 0"),
        Says("unknown-field", "max_batch: 0", "'max_batch_size'"),
        'has no field named "max_batch"',
    ),
    Mistake(
        "unknown field of a step",
        ENSEMBLE,
        swap_first("model_version: -1", "version: -1"),
        Says("unknown-field", "version: -1", "'model_version'"),
        'has no field named "version"',
    ),
    Mistake(
        "wrong bracket", "dit", swap("input [", "input ("), Says("syntax", "input (", "'{'"), 'Expected "{", found "("'
    ),
    Mistake(
        "missing bracket",
        "dit",
        swap_first("dims: [ 1 ] }", "dims: [ 1 }"),
        Says("syntax", "dims: [ 1 }", "comma"),
        "Expected",
    ),
    Mistake(
        "missing quote",
        "dit",
        swap('backend: "python"', 'backend: "python'),
        Says("syntax", 'backend: "python', "Close it"),
        "String literals cannot cross line boundaries",
    ),
    Mistake(
        "missing colon",
        "dit",
        swap("max_batch_size: 1", "max_batch_size 1"),
        Says("syntax", "max_batch_size 1", "name: value"),
        'Expected ":"',
    ),
    Mistake(
        "no number",
        "dit",
        swap("max_batch_size: 1", "max_batch_size: many"),
        Says("syntax", "max_batch_size: many", "whole number"),
        "Expected integer",
    ),
    Mistake(
        "data type without TYPE_",
        "prepare",
        swap('"WIDTH" data_type: TYPE_INT32', '"WIDTH" data_type: INT32'),
        Says("unknown-value", '"WIDTH" data_type', "Write TYPE_INT32"),
        'Unknown enumeration value of "INT32"',
    ),
    Mistake(
        "kind without KIND_",
        "dit",
        swap("kind: KIND_AUTO", "kind: GPU"),
        Says("unknown-value", "kind: GPU", "Write KIND_GPU"),
        'Unknown enumeration value of "GPU"',
    ),
    Mistake(
        "parameter without string_value",
        "dit",
        swap('value { string_value: "256" }', 'value: "256"'),
        Says("syntax", 'value: "256"', "string_value"),
        'Expected "{"',
    ),
    Mistake(
        "field twice",
        "dit",
        swap("max_batch_size: 1", "max_batch_size: 1\nmax_batch_size: 32"),
        Says("field-twice", "max_batch_size: 32", "Delete one"),
        "specified multiple times",
    ),
    Mistake(
        "batching in an ensemble",
        ENSEMBLE,
        append("dynamic_batching { }"),
        Says("excluding-fields", "dynamic_batching", "step models"),
        "another member of oneof",
    ),
    Mistake(
        "byte order mark", "dit", lambda text: f"\ufeff{text}", Says("syntax", "# dit", "UTF-8"), "Expected identifier"
    ),
]
MODELS = [
    Mistake(
        "name is not the directory's",
        "prepare",
        append('name: "prepar"'),
        Says("name", 'name: "prepar"', 'name: "prepare"'),
        "unexpected directory name",
    ),
    Mistake(
        "misspelt backend",
        "prepare",
        swap('backend: "python"', 'backend: "pyton"'),
        Says("backend", "pyton", "'python'"),
        "unable to find backend library for backend 'pyton'",
    ),
    Mistake(
        "no backend",
        "prepare",
        swap('backend: "python"', ""),
        Says("backend", "# prepare", 'backend: "python"', severity="warning"),
        None,
    ),
    Mistake(
        "no dims",
        "prepare",
        swap('"HEIGHT" data_type: TYPE_INT32 dims: [ 1 ]', '"HEIGHT" data_type: TYPE_INT32'),
        Says("dims", '"HEIGHT"', "dims: ["),
        "must specify 'dims'",
    ),
    Mistake(
        "dimension of 0",
        "text_encoder",
        swap("dims: [ -1, -1 ]", "dims: [ -1, 0 ]"),
        Says("dims", "dims: [ -1, 0 ]", "-1 for any"),
        "dimension must be integer >= 1",
    ),
    Mistake(
        "reshape of another size",
        "prepare",
        swap_first("dims: [ 1 ]", "dims: [ 1 ] reshape { shape: [ 2 ] }"),
        Says("dims", "reshape", "equal"),
        "has different size for dims and reshape",
    ),
    Mistake(
        "no data type",
        "prepare",
        swap('"DEADLINE_MS" data_type: TYPE_INT32', '"DEADLINE_MS"'),
        Says("tensor", '"DEADLINE_MS"', "data_type"),
        "must specify 'data_type'",
    ),
    Mistake(
        "no tensor name",
        "prepare",
        swap('{ name: "DEADLINE_MS" ', "{ "),
        Says("tensor", "{ data_type", "name:"),
        "must specify 'name'",
    ),
    Mistake(
        "negative batch size",
        "prepare",
        swap("max_batch_size: 64", "max_batch_size: -1"),
        Says("batching", "max_batch_size: -1", "0 means"),
        "must be non-negative value",
    ),
    Mistake(
        "preferred batch too large",
        "text_encoder",
        swap("dynamic_batching {", "dynamic_batching {\n  preferred_batch_size: [ 8, 64 ]"),
        Says("batching", "preferred_batch_size", "raise max_batch_size"),
        "preferred size must be <= max batch size",
    ),
    Mistake(
        "no default priority",
        "dit",
        batching("priority_levels: 3"),
        Says("priority", "dynamic_batching {", "from 1"),
        "default priority level must be in range [1, 3]",
    ),
    Mistake(
        "policy for a priority that is not",
        "dit",
        batching(
            "priority_levels: 3 default_priority_level: 2",
            "priority_queue_policy { key: 4 value { max_queue_size: 1 } }",
        ),
        Says("priority", "key: 4", "Raise priority_levels"),
        "must have priority level in range [1, 3]",
    ),
    Mistake(
        "order and priorities",
        "dit",
        batching("priority_levels: 3 default_priority_level: 2", "preserve_ordering: true"),
        Says("priority", "preserve_ordering", "Delete one"),
        "Only one priority level is allowed",
    ),
    Mistake(
        "timeout in milliseconds",
        "dit",
        batching("default_queue_policy {", "default_timeout_microseconds: 300", "}"),
        Says("timeout", "default_timeout_microseconds: 300", "write 300000;", severity="warning"),
        None,
    ),
    Mistake(
        "timeout that cannot be shortened",
        "dit",
        batching("default_queue_policy {", "allow_timeout_override: true", "}"),
        Says("timeout", "allow_timeout_override", "default_timeout_microseconds", severity="warning"),
        None,
    ),
    Mistake(
        "a queue in Triton",
        "dit",
        batching("default_queue_policy {", "max_queue_size: 16", "}"),
        Says("queue-policy", "default_queue_policy {", "max_queue_size", severity="warning"),
        None,
    ),
    Mistake(
        "priorities in Triton",
        "text_encoder",
        swap("dynamic_batching {", "dynamic_batching {\n  priority_levels: 3 default_priority_level: 2"),
        Says("queue-policy", "priority_levels", "PRIORITY", severity="warning"),
        None,
    ),
    Mistake(
        "gpus of a CPU",
        "prepare",
        swap("kind: KIND_CPU", "kind: KIND_CPU gpus: [ 0 ]"),
        Says("instance-group", "gpus: [ 0 ]", "KIND_GPU"),
        "has kind KIND_CPU but specifies one or more GPUs",
    ),
    Mistake(
        "cache of a decoupled model",
        "text_encoder",
        append("response_cache { enable: true }\nmodel_transaction_policy { decoupled: true }"),
        Says("cache", "response_cache {", "Delete"),
        "Response Cache does not currently support",
    ),
    Mistake(
        "warm-up file missing",
        "prepare",
        append(
            'model_warmup [ { name: "w" batch_size: 1 inputs { key: "PROMPT" '
            'value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "prompt" } } } ]'
        ),
        Says("warmup", "model_warmup", "prepare/warmup/prompt"),
        "failed to open",
    ),
    Mistake(
        "parameter twice",
        "prepare",
        append('parameters { key: "max_pixels" value { string_value: "4194304" } }'),
        Says("duplicate-key", 'key: "max_pixels"', "Keep one"),
        None,
    ),
    Mistake(
        "model.py is no Python",
        "prepare",
        append("def broken(:"),
        Says("python-syntax", "def broken(:", "def broken"),
        "SyntaxError",
        file="1/model.py",
    ),
    Mistake(
        "no TritonPythonModel",
        "prepare",
        swap("class TritonPythonModel", "class TritonModel"),
        Says("python-class", '"""', "'TritonModel'"),
        "TritonPythonModel",
        file="1/model.py",
    ),
    Mistake(
        "no execute",
        "prepare",
        swap("def execute(", "def execut("),
        Says("python-class", "class TritonPythonModel", "'execut'"),
        None,
        file="1/model.py",
    ),
]
