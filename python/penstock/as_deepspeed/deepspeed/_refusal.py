"""The error for calls and settings that DeepSpeed refuses, too."""

from __future__ import annotations

from penstock import ConfigError


class DeepSpeedRefusal(ConfigError, AssertionError, NotImplementedError):  # type: ignore[misc]
    """A call or setting for which DeepSpeed raises one of these errors or ValueError."""
