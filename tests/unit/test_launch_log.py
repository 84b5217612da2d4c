"""The reason that is read out of tritonserver's log; the excerpts are of real runs."""

# ruff: noqa: E501 (log lines as they are)

from __future__ import annotations

import pytest

from ditpack.tritonserver.launch.log import Failure, find_failure, last_error

# tritonserver 2.51 on a machine without a GPU writes these always.
HEALTHY = """\
W1129 17:17:27.672885 6196 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned memory pool \
will not be available: CUDA driver version is insufficient for CUDA runtime version"
E1129 17:17:27.672968 6196 server.cc:241] "CudaDriverHelper has not been initialized."
I1129 17:17:27.674123 6196 model_lifecycle.cc:472] "loading: good:1"
I1129 17:17:27.799030 6196 model_lifecycle.cc:839] "successfully loaded 'good'"
Error: Failed to initialize NVML
W1129 17:17:28.041254 6196 metrics.cc:798] "DCGM unable to start: DCGM initialization error"
"""

IMPORT = r"""
E1129 17:17:28.015713 6196 backend_model.cc:692] "ERROR: Failed to create instance: ModuleNotFoundError: No module named 'nothing'\n\nAt:\n  /models/prepare/1/model.py(1): <module>\n  <frozen importlib._bootstrap>(241): _call_with_frames_removed\n"
E1129 17:17:28.015987 6196 model_lifecycle.cc:642] "failed to load 'prepare' version 1: Internal: ModuleNotFoundError: No module named 'nothing'\n\nAt:\n  /models/prepare/1/model.py(1): <module>\n  <frozen importlib._bootstrap>(241): _call_with_frames_removed\n  <frozen importlib._bootstrap_external>(940): exec_module\n"
I1129 17:17:28.016005 6196 model_lifecycle.cc:777] "failed to load 'prepare'"
"""

INITIALIZE = r"""
2026-11-29T17:17:28Z E 6196 model_lifecycle.cc:642] "failed to load 'dit' version 1: Internal: ParameterError: dit: parameter attention = \"flsh\": must be one of auto, sdpa\nor left out\n\nAt:\n  /opt/ditpack/parameters.py(2): deeper\n  /models/dit/1/model.py(5): initialize\n"
2026-11-29T17:17:28Z I 6196 model_lifecycle.cc:777] "failed to load 'dit'"
"""

# Before 24.06 a message was several lines, not quoted.
OLDER = """
E0101 10:00:00.015987 1 model_lifecycle.cc:630] failed to load 'dit' version 1: Internal: ValueError: no such thing

At:
  /models/dit/1/model.py(5): initialize

I0101 10:00:00.016005 1 model_lifecycle.cc:765] failed to load 'dit'
"""

NO_GPU = """
E1129 17:18:47.540865 6577 model_lifecycle.cc:642] "failed to load 'good' version 1: Invalid argument: instance group \
good_0 of model good has kind KIND_GPU but no GPUs are available"
"""

CONFIG = """
[libprotobuf ERROR /tmp/protobuf/text_format.cc:337] Error parsing text-format inference.ModelConfig: 2:10: Message type \
"inference.ModelConfig" has no field named "max_batch".
E1129 17:18:44.387647 6521 model_repository_manager.cc:1460] "Poll failed for model directory 'dit': failed to read text \
proto from /models/dit/config.pbtxt"
"""

ENSEMBLE = """
E1129 17:18:48.567389 6589 model_repository_manager.cc:703] "Invalid argument: ensemble qwen_image contains models that \
are not available or ambiguous: absent"
"""

CONSEQUENCE = """
E1129 17:18:47.540865 6577 model_lifecycle.cc:642] "failed to load 'a_first' version 1: Invalid argument: ensemble \
'a_first' depends on 'good' which has no loaded version. Model 'good' loading failed with error: version 1"
"""

LIBRARY = """
/tmp/ditpack-x/backends/python/triton_python_backend_stub: error while loading shared libraries: libpython3.11.so.1.0: \
cannot open shared object file: No such file or directory
"""

PORT = """
E1129 17:18:54.010032 6711 main.cc:245] "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18001' already in use "
"""


def test_a_healthy_log_is_no_failure() -> None:
    assert find_failure("") is None
    assert find_failure(HEALTHY) is None
    assert last_error(HEALTHY) is None


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            IMPORT,
            Failure(
                "model 'prepare' failed to load: ModuleNotFoundError: No module named 'nothing'",
                "/models/prepare/1/model.py:1 (<module>)",
            ),
        ),
        (
            INITIALIZE,
            Failure(
                "model 'dit' failed to load: "
                'ParameterError: dit: parameter attention = "flsh": must be one of auto, sdpa or left out',
                "/opt/ditpack/parameters.py:2 (deeper)",
            ),
        ),
        (
            OLDER,
            Failure("model 'dit' failed to load: ValueError: no such thing", "/models/dit/1/model.py:5 (initialize)"),
        ),
        (
            NO_GPU,
            Failure(
                "model 'good' failed to load: "
                "instance group good_0 of model good has kind KIND_GPU but no GPUs are available"
            ),
        ),
        (
            CONFIG,
            Failure(
                "model 'dit' failed to load: config.pbtxt, line 2:10: "
                'Message type "inference.ModelConfig" has no field named "max_batch".'
            ),
        ),
        (ENSEMBLE, Failure("ensemble qwen_image contains models that are not available or ambiguous: absent")),
        (
            LIBRARY,
            Failure(
                "triton_python_backend_stub cannot start: "
                "libpython3.11.so.1.0: cannot open shared object file: No such file or directory"
            ),
        ),
        (PORT, Failure("GRPC service: Unavailable - Socket '127.0.0.1:18001' already in use")),
        (
            "/opt/bin/tritonserver: unrecognized option '--nonsense'\nUsage: tritonserver [options]\n",
            Failure("unrecognized option '--nonsense'"),
        ),
    ],
    ids=["import", "initialize", "older", "no-gpu", "config", "ensemble", "library", "port", "option"],
)
def test_reasons(log: str, expected: Failure) -> None:
    assert find_failure(HEALTHY + log) == expected


def test_the_cause_comes_before_its_consequence() -> None:
    failure = find_failure(HEALTHY + CONSEQUENCE + NO_GPU + INITIALIZE)
    assert failure is not None
    assert failure.reason.startswith("model 'good' failed to load: instance group")
    assert failure.others == ("a_first", "dit")


def test_a_very_long_reason_is_cut() -> None:
    failure = find_failure(f"E1 1 x.cc:1] \"failed to load 'dit' version 1: Internal: {'x' * 5000}\"\n")
    assert failure is not None
    assert len(failure.reason) < 700


def test_the_last_error_is_the_guess_for_what_is_not_known() -> None:
    log = HEALTHY + 'E1129 17:18:54.010032 6711 main.cc:245] "something new"\n'
    assert last_error(log + "error: creating server: Internal - failed to load all models\n") == "something new"
    assert find_failure(log) is None
