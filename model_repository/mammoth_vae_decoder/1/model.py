"""Triton's way in to the image decoder. What it does is in vae_decoder_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.vae_decoder_door import VaeDecoderDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = VaeDecoderDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)

    def finalize(self):
        self._door.finalize()
