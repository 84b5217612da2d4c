"""The package's own logging, sent to Triton's log: a stub process has no other place that anyone reads."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils


class _TritonHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(message)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(message)
            elif record.levelno >= logging.INFO:
                pb_utils.Logger.log_info(message)
            else:
                pb_utils.Logger.log_verbose(message)
        except Exception:  # logging's own way to report that logging failed
            self.handleError(record)


def route_logs() -> None:
    """Send what ``ditpack`` logs, from INFO up, to Triton's log. Calling it again changes nothing."""
    logger = logging.getLogger("ditpack")
    if not any(isinstance(handler, _TritonHandler) for handler in logger.handlers):
        logger.addHandler(_TritonHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False
