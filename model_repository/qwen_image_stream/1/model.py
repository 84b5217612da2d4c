"""Triton's way in. What it does is in stream_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.stream_door import StreamDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = StreamDoor.load(args)

    async def execute(self, requests):
        return await self._door.execute(requests)
