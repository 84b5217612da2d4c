"""``ditpack bench``: perf_analyzer against a running server, with image requests and windows that fit them."""
