"""Python client of a ditpack server: ``Client("localhost:8000").generate("a red kite").image.show()``."""

from ditpack_client.client import AsyncClient, Client
from ditpack_client.errors import GenerationError
from ditpack_client.result import ImageResult
from ditpack_client.wire import EditRequest, ImageRequest

__all__ = ["AsyncClient", "Client", "EditRequest", "GenerationError", "ImageRequest", "ImageResult"]
