"""Starting a real ``tritonserver`` on the model repository, and leaving nothing behind when it ends."""

from ditpack.tritonserver.launch.serve_error import ServeError
from ditpack.tritonserver.launch.server import TritonServer

__all__ = ["ServeError", "TritonServer"]
