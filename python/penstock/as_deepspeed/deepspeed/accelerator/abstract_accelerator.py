"""A base class for isinstance() checks."""


class DeepSpeedAccelerator:
    """Base class of accelerators."""
