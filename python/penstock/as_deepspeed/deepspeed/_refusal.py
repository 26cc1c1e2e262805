"""The error for what DeepSpeed refuses, too."""

from __future__ import annotations

from penstock import ConfigError


class DeepSpeedRefusal(ConfigError, AssertionError, NotImplementedError):  # type: ignore[misc]
    """A call or setting that DeepSpeed refuses with an error of one of these classes."""
