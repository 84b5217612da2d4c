"""Triton's own series that the dashboard and the alerts use. ``tests/server`` sees that they exist, where it can."""

INFERENCE = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_queue_duration_us",
    "nv_inference_pending_request_count",
)
GPU = ("nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes", "nv_gpu_power_usage")  # by DCGM
