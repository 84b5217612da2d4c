"""Triton's way in to the text encoder. What it does is in text_encoder_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.text_encoder_door import TextEncoderDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = TextEncoderDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)
