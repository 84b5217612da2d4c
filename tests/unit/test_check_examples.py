"""Configs of the kinds that Triton documents, none of them ditpack's: the linter has nothing to say about any."""

from __future__ import annotations

from pathlib import Path

import pytest

from ditpack.tritonserver.check import check_repository

EXAMPLES = {
    "minimal": """
        platform: "tensorrt_plan" max_batch_size: 8
        input [ { name: "input0" data_type: TYPE_FP32 dims: [ 16 ] }, { name: "input1" data_type: TYPE_FP32 dims: 16 } ]
        output [ { name: "output0" data_type: TYPE_FP32 dims: [ 16 ] } ]
    """,
    "completed by the backend": 'backend: "onnxruntime"',
    "image classifier": """
        name: "image_classifier" platform: "onnxruntime_onnx" max_batch_size : 0
        input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ]
                  reshape { shape: [ 1, 3, 224, 224 ] } } ]
        output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] }
                   label_filename: "labels.txt" } ]
    """,
    "scalars by reshape": """
        backend: "custom_one" max_batch_size: 4;
        input < name: "in" data_type: TYPE_INT64 dims: [ 1 ] reshape: { shape: [ ] } >
        output { name: "out" data_type: TYPE_BF16 dims: [ 4, -1 ] reshape: { shape: [ 2, 2, -1 ] } }
    """,
    "dynamic batching and queue policies": """
        backend: "pytorch" max_batch_size: 16
        input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1, 3 ] allow_ragged_batch: true }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
        dynamic_batching {
          preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 preserve_ordering: false
          priority_levels: 2 default_priority_level: 1
          default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5000 allow_timeout_override: true }
          priority_queue_policy { key: 1 value: { max_queue_size: 10 } }
          priority_queue_policy { key: 2 value: { timeout_action: REJECT default_timeout_microseconds: 100000 } }
        }
        batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX" data_type: TYPE_FP32
                        source_input: "INPUT__0" } ]
    """,
    "sequences": """
        backend: "python" max_batch_size: 8
        input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
        output { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 }
        sequence_batching {
          max_sequence_idle_microseconds: 5000000
          oldest { max_candidate_sequences: 4 max_queue_delay_microseconds: 1000 }
          control_input [
            { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
            { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
          ]
          state [ { input_name: "IN_STATE" output_name: "OUT_STATE" data_type: TYPE_INT32 dims: [ -1 ]
                    initial_state: { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "initial" } } ]
        }
    """,
    "instances, optimization and warm-up": """
        backend: "tensorrt" max_batch_size: 2
        version_policy: { all { } }
        input { name: "x" data_type: TYPE_FP16 dims: [ 8 ] }
        output { name: "y" data_type: TYPE_FP16 dims: [ 8 ] }
        instance_group [
          { count: 1 kind: KIND_GPU gpus: [ 0 ] profile: "0" },
          { count: 2 kind: KIND_GPU gpus: [ 1, 2 ]
            rate_limiter { resources [ { name: "R1" count: 4 }, { name: "R2" global: true count: 2 } ] priority: 2 } }
        ]
        optimization { cuda { graphs: true graph_spec { batch_size: 2 input { key: "x" value: { dim: [ 8 ] } } } } }
        model_warmup { name: "zeros" batch_size: 1 count: 2
                       inputs { key: "x" value: { data_type: TYPE_FP16 dims: [ 8 ] zero_data: true } } }
        response_cache { enable: true }
    """,
    "decoupled": """
        backend: "python" max_batch_size: 0
        input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
        input { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] optional: true }
        output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
        model_transaction_policy { decoupled: True }
        instance_group [ { kind: KIND_MODEL } ]
        parameters: { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }
        parameters: { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "no" } }
        parameters: { key: "two" value: { string_value: "adjacent " 'literals' } }
    """,
}
PYTHON = """
import triton_python_backend_utils as pb_utils

class Base: pass

class TritonPythonModel(Base):
    @staticmethod
    def auto_complete_config(config): return config
"""


def write(repository: Path, name: str, config: str, version: str = "1") -> None:
    (repository / name / version).mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if 'backend: "python"' in config:
        (repository / name / version / "model.py").write_text(PYTHON)


@pytest.mark.parametrize("name", EXAMPLES)
def test_single_models(tmp_path: Path, name: str) -> None:
    write(tmp_path, name.replace(" ", "_"), EXAMPLES[name])
    assert [finding.rule for finding in check_repository(tmp_path)] == ["queue-policy"] * ("policies" in name)


def test_an_ensemble_with_branches_and_versions(tmp_path: Path) -> None:
    """The shape of the documentation's: preprocessing feeds two models; the steps have versions and batches."""
    write(
        tmp_path,
        "preprocess",
        """backend: "dali" max_batch_size: 32
           input [ { name: "RAW" data_type: TYPE_UINT8 dims: [ -1 ] } ]
           output [ { name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]""",
    )
    write(
        tmp_path,
        "classify",
        """platform: "onnxruntime_onnx" max_batch_size: 16 version_policy { specific { versions: 3 } }
           input [ { name: "FORMATTED" data_type: TYPE_FP32 dims: [ -1, 224, 224 ] } ]
           output [ { name: "CLASSES" data_type: TYPE_FP32 dims: [ 1000 ] },
                    { name: "UNUSED" data_type: TYPE_FP32 dims: [ 7 ] } ]""",
        "3",
    )
    write(
        tmp_path,
        "segment",
        """backend: "fil" max_batch_size: 0
           input [ { name: "IMAGE" data_type: TYPE_FP32 dims: [ -1, 3, 224, 224 ] } ]
           output [ { name: "SEGMENTS" data_type: TYPE_FP32 dims: [ -1, 3, 224, 224 ] } ]""",
    )
    write(
        tmp_path,
        "both",
        """name: "both" platform: "ensemble" max_batch_size: 8
           input [ { name: "FILE" data_type: TYPE_UINT8 dims: [ -1 ] } ]
           output [ { name: "CLASSES" data_type: TYPE_FP32 dims: [ 1000 ] },
                    { name: "SEGMENTS" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
           ensemble_scheduling { step [
             { model_name: "classify" model_version: 3 input_map { key: "FORMATTED" value: "pixels" }
               output_map { key: "CLASSES" value: "CLASSES" } },
             { model_name: "preprocess" model_version: -1 input_map { key: "RAW" value: "FILE" }
               output_map { key: "PIXELS" value: "pixels" } },
             { model_name: "segment" model_version: -1 input_map { key: "IMAGE" value: "pixels" }
               output_map { key: "SEGMENTS" value: "SEGMENTS" } } ] }""",
    )
    assert check_repository(tmp_path) == []
