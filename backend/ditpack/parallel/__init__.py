"""One transformer on several devices: transforms over a plain model, and the worker processes that run it."""
