"""What can be wrong with a model, as a sentence for the person who launched the worker."""

from __future__ import annotations


class ModelError(Exception):
    """Base of everything a model path can be at fault for. Its message is all a person needs."""


class UnsupportedModelError(ModelError):
    """The model is well-formed, but asks for something this engine doesn't compute."""


class InvalidModelError(ModelError):
    """Files of the model are missing, damaged or contradict each other."""


class ModelSourceError(ModelError):
    """The model can't be found or fetched."""
