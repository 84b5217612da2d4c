"""Scores of pictures: a small classifier trained on the scenes themselves, and plain checks where they suffice."""
