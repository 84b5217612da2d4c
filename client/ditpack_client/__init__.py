"""Python client of a ditpack server: ``Client("localhost:8000").generate("a red kite").image.show()``."""

from ditpack_client.async_client import AsyncClient
from ditpack_client.client import Client
from ditpack_client.errors import GenerationError
from ditpack_client.events import Event, Finished, Preview, Queued, Retrying, Step
from ditpack_client.result import ImageResult
from ditpack_client.wire import EditRequest, ImageRequest

__all__ = [
    "AsyncClient",
    "Client",
    "EditRequest",
    "Event",
    "Finished",
    "GenerationError",
    "ImageRequest",
    "ImageResult",
    "Preview",
    "Queued",
    "Retrying",
    "Step",
]
