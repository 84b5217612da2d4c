"""Training the embedded model: ``python -m ditpack.demo_model.train``."""
