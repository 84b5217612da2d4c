"""Triton's way in to the request resolver. What it does is in prepare_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.prepare_door import PrepareDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = PrepareDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)
