"""Triton's way in to the VAE's encoder, vae_encoder_door.py; nothing heavy may be imported here."""

from ditpack.tritonserver.vae_encoder_door import VaeEncoderDoor


class TritonPythonModel:
    def initialize(self, args):
        self._door = VaeEncoderDoor.load(args)

    def execute(self, requests):
        return self._door.execute(requests)
