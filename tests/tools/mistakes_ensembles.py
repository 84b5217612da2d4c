"""Mistakes in an ensemble's wiring, in ditpack's own parameters, and against the machine."""

from __future__ import annotations

from mistakes import ENSEMBLE, Mistake, Says, add_input, add_output, add_step, append, chain, swap, swap_first

ENSEMBLES = [
    Mistake(
        "no platform",
        ENSEMBLE,
        swap('platform: "ensemble"', ""),
        Says("ensemble-field", "ensemble_scheduling", 'platform: "ensemble"'),
        "platform",
    ),
    Mistake(
        "instances of an ensemble",
        ENSEMBLE,
        append("instance_group [ { kind: KIND_CPU } ]"),
        Says("ensemble-field", "instance_group", "step models"),
        "instance group should not be specified",
    ),
    Mistake(
        "warm-up of an ensemble",
        ENSEMBLE,
        append('model_warmup [ { name: "w" batch_size: 1 } ]'),
        Says("ensemble-field", "model_warmup", "step models"),
        "model_warmup can not be specified",
    ),
    Mistake(
        "backend of an ensemble",
        ENSEMBLE,
        append('backend: "python"'),
        Says("ensemble-field", "backend:", "Delete it"),
        "empty backend type",
    ),
    Mistake(
        "data types differ",
        ENSEMBLE,
        swap('"NUM_INFERENCE_STEPS" data_type: TYPE_INT32', '"NUM_INFERENCE_STEPS" data_type: TYPE_INT64'),
        Says("data-type", '"NUM_INFERENCE_STEPS" data_type', "TYPE_INT32"),
        "inconsistent data type",
    ),
    Mistake(
        "shapes differ",
        ENSEMBLE,
        swap("dims: [ -1, -1, 3 ]", "dims: [ -1, 3 ]"),
        Says("shape", '"PIXELS"', "[-1, -1, 3]"),
        "inconsistent shape",
    ),
    Mistake(
        "data types of two steps differ",
        ENSEMBLE,
        swap(
            'input_map { key: "REQUEST" value: "request" }\n      input_map { key: "LATENTS"',
            'input_map { key: "REQUEST" value: "input_ids" }\n      input_map { key: "LATENTS"',
        ),
        Says("data-type", 'key: "REQUEST" value: "input_ids"', "Map another"),
        "inconsistent data type",
    ),
    Mistake(
        "step model missing",
        ENSEMBLE,
        swap('model_name: "vae_decoder"', 'model_name: "vae_decodr"'),
        Says("step-model", "vae_decodr", "'vae_decoder'"),
        "not available or ambiguous",
    ),
    Mistake(
        "step version missing",
        ENSEMBLE,
        swap('model_name: "dit"\n      model_version: -1', 'model_name: "dit"\n      model_version: 3'),
        Says("step-model", "model_version: 3", "serves 1"),
        "required version 3 is not loaded",
    ),
    Mistake(
        "wrong key in an input_map",
        ENSEMBLE,
        swap('input_map { key: "LATENTS"', 'input_map { key: "LATENT"'),
        Says("map-key", '"LATENT"', "'LATENTS'"),
        "is mapping to non-existing input LATENT",
    ),
    Mistake(
        "wrong key in an output_map",
        ENSEMBLE,
        swap('output_map { key: "PIXELS"', 'output_map { key: "PIXEL"'),
        Says("map-key", '"PIXEL"', "'PIXELS'"),
        "is mapped from non-existing output PIXEL",
    ),
    Mistake(
        "dangling tensor",
        ENSEMBLE,
        swap('key: "EMBEDS" value: "embeds" }\n      input_map', 'key: "EMBEDS" value: "embds" }\n      input_map'),
        Says("unconnected", '"embds"', "'embeds'"),
        "is not written",
    ),
    Mistake(
        "step input not mapped",
        ENSEMBLE,
        swap(
            '      input_map { key: "REQUEST" value: "request" }\n      input_map { key: "LATENTS"',
            '      input_map { key: "LATENTS"',
        ),
        Says("unmapped-input", 'model_name: "vae_decoder"', 'key: "REQUEST"'),
        "is not mapped to any ensemble tensors",
    ),
    Mistake(
        "ensemble input not used",
        ENSEMBLE,
        add_input('name: "STRENGTH" data_type: TYPE_FP32 dims: [ 1 ]'),
        Says("unused", '"STRENGTH"', "Map it"),
        "is not used",
    ),
    Mistake(
        "ensemble output not written",
        ENSEMBLE,
        add_output('name: "MASK" data_type: TYPE_STRING dims: [ 1 ]'),
        Says("unconnected", '"MASK"', "PIXELS"),
        "is not used",
    ),
    Mistake(
        "tensor that nothing reads",
        ENSEMBLE,
        add_step("text_encoder", "INPUT_IDS input_ids", "EMBEDS spare"),
        Says("unused", '"spare"', "Delete this output_map"),
        "is unused in ensemble",
    ),
    Mistake(
        "two producers",
        ENSEMBLE,
        add_step("text_encoder", "INPUT_IDS input_ids", "EMBEDS embeds"),
        Says("two-producers", 'output_map { key: "EMBEDS" value: "embeds" }\n    }', "another name"),
        "can appear in an output map only once",
    ),
    Mistake(
        "step writes an input of the ensemble",
        ENSEMBLE,
        lambda text: text.replace("SEED_USED", "SEED"),
        Says("two-producers", 'output_map { key: "SEED"', "another name"),
        None,
    ),
    Mistake(
        "batch larger than a step's",
        ENSEMBLE,
        swap("max_batch_size: 0", "max_batch_size: 4"),
        Says("batch-size", "max_batch_size: 4", "Lower it to 1"),
        "allows maximum batch size 4",
    ),
    Mistake(
        "map key twice",
        ENSEMBLE,
        swap_first(
            'input_map { key: "WIDTH" value: "WIDTH" }',
            'input_map { key: "WIDTH" value: "HEIGHT" }\n      input_map { key: "WIDTH" value: "WIDTH" }',
        ),
        Says("duplicate-key", 'key: "WIDTH" value: "HEIGHT"', "Keep one"),
        None,
    ),
    Mistake(
        "steps in a circle",
        ENSEMBLE,
        chain(
            swap('  { name: "SEED" data_type: TYPE_INT64 dims: [ 1 ] optional: true },\n', ""),
            swap('input_map { key: "SEED" value: "SEED" }', 'input_map { key: "SEED" value: "SEED_USED" }'),
        ),
        Says("cycle", '{\n      model_name: "prepare"', "Break the circle"),
        "is not written",
    ),
    Mistake(
        "optional input of a step that needs it",
        ENSEMBLE,
        chain(
            add_input('name: "TOKENS" data_type: TYPE_INT64 dims: [ -1 ] optional: true'),
            add_output('name: "TOKEN_EMBEDS" data_type: TYPE_FP32 dims: [ -1, -1 ]'),
            add_step("text_encoder", "INPUT_IDS TOKENS", "EMBEDS TOKEN_EMBEDS"),
        ),
        Says("optional", '"TOKENS"', "Delete optional: true", severity="warning"),
        None,
    ),
]
DITPACK = [
    Mistake(
        "unknown parameter",
        "dit",
        swap('key: "max_queue_size"', 'key: "max_queue_sizes"'),
        Says("parameter", '"max_queue_sizes"', "'max_queue_size'"),
        "unknown parameter",
    ),
    Mistake(
        "parameter out of range",
        "dit",
        swap('string_value: "256"', 'string_value: "-1"'),
        Says("parameter", 'string_value: "-1"', "from 0 to 65536"),
        "must be an integer from 0 to 65536",
    ),
    Mistake(
        "parameter that is no choice",
        "vae_decoder",
        swap('key: "dtype" value { string_value: "auto" }', 'key: "dtype" value { string_value: "fp16" }'),
        Says("parameter", '"fp16"', "bfloat16"),
        "must be one of",
    ),
    Mistake(
        "several devices of one GPU",
        "dit",
        swap('key: "devices" value { string_value: "none" }', 'key: "devices" value { string_value: "cpu,cpu" }'),
        Says("instance-kind", "kind: KIND_AUTO", "Use KIND_MODEL"),
        "must be KIND_MODEL",
    ),
    Mistake(
        "no devices",
        "dit",
        swap("kind: KIND_AUTO", "kind: KIND_MODEL"),
        Says("instance-kind", "kind: KIND_MODEL", "devices"),
        "must name the devices",
    ),
    Mistake(
        "a model of one device",
        "vae_decoder",
        swap("kind: KIND_AUTO", "kind: KIND_MODEL"),
        Says("instance-kind", "kind: KIND_MODEL", "Use KIND_AUTO."),
        "must be KIND_AUTO, KIND_GPU or KIND_CPU",
    ),
]
MACHINE = [
    Mistake(
        "GPU where there is none",
        "prepare",
        swap("kind: KIND_CPU", "kind: KIND_GPU"),
        Says("gpu", "kind: KIND_GPU", "KIND_AUTO"),
        "no GPUs are available",
    ),
    Mistake(
        "GPU that does not exist",
        "prepare",
        swap("kind: KIND_CPU", "kind: KIND_GPU gpus: [ 7 ]"),
        Says("gpu", "kind: KIND_GPU", "KIND_AUTO"),
        "specifies invalid or unsupported gpu id 7",
    ),
    Mistake(
        "field that this server does not know",
        ENSEMBLE,
        swap("ensemble_scheduling {", "ensemble_scheduling {\n  max_inflight_requests: 8"),
        Says("newer-field", "max_inflight_requests", "newer tritonserver"),
        'has no field named "max_inflight_requests"',
    ),
    Mistake(
        "backend that this server has not",
        "prepare",
        swap('backend: "python"', 'backend: "onnxruntime"'),
        Says("backend", "onnxruntime", "python"),
        "unable to find backend library",
    ),
    Mistake(
        "checkpoint that is not there",
        "prepare",
        swap(
            'key: "checkpoint" value { string_value: "auto" }', 'key: "checkpoint" value { string_value: "/no/such" }'
        ),
        Says("checkpoint", "/no/such", "diffusers' layout"),
        "no such directory",
    ),
]
