"""Triton's way in to the resolver of edits, prepare_edit_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.prepare_edit_door import PrepareEditDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = PrepareEditDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)

    def finalize(self):
        self._door.finalize()
