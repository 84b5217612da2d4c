"""Triton's way in to the denoising engine. What it does is in dit_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.dit_door import DitDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = DitDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)

    def finalize(self):
        self._door.finalize()

    def is_ready(self):
        return self._door.is_ready()
