"""Triton's way in. What it does is in control_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.control_door import ControlDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = ControlDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)
