"""Triton's way in to MammothModa2's resolver, mammoth_prepare_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.mammoth_prepare_door import MammothPrepareDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = MammothPrepareDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)
