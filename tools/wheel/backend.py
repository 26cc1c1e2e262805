"""scikit-build-core's build back end; what it makes is for the torch that it is built against.

A wheel is tagged with torch's minor version (`penstock-0.1.0-0torch2.13-...`) and requires it: C++
libraries of torch are compatible within one. An sdist, and an editable install, take any torch that
Penstock supports.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]

SUPPORTED = "torch>=2.11,<2.16"
OTHERS = ["numpy"]


def torch_minor() -> tuple[int, int]:
    """Of the torch beside this back end."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """As scikit-build-core's, for one minor version of torch."""
    major, minor = torch_minor()
    tag = {"wheel.build-tag": f"0torch{major}.{minor}"}
    return build.build_wheel(wheel_directory, tag | (config_settings or {}), metadata_directory)


class Requirements:
    """What scikit-build-core asks for the project's dependencies."""

    _pinned = False

    def build_state(self, state: str) -> None:
        """Called first, with what is built."""
        self._pinned = state == "wheel"

    def dynamic_metadata(
        self, settings: dict[str, Any], project: dict[str, Any]
    ) -> dict[str, list[str]]:
        """Of the project's fields those that are not fixed."""
        major, minor = torch_minor()
        pinned = f"torch>={major}.{minor},<{major}.{minor + 1}"
        return {"dependencies": [pinned if self._pinned else SUPPORTED, *OTHERS]}
