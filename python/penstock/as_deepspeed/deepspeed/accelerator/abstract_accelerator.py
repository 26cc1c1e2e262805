"""For isinstance()."""


class DeepSpeedAccelerator:
    """Base class of accelerators."""
