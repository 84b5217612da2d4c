"""The embedded model: the scenes it learns from, how it is trained (``train``) and how it is judged (``judge``)."""
