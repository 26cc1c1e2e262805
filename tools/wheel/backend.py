"""scikit-build-core's build back end, for wheels that fit the torch that they are built against.

A wheel is tagged with torch's minor version and a hash of the sources
(`penstock-0.1.0-0torch2.13.1f3a90c2-...`) and requires that version: C++ libraries of torch are
compatible within a minor version. An sdist, and an editable install, take any torch that Penstock
supports.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "gpu"))
import source_tree  # noqa: E402 - from the folder above

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
PACKAGED = ("CMakeLists.txt", "cmake", "include", "src", "python", "pyproject.toml", "tools/wheel")


def torch_minor() -> tuple[int, int]:
    """Returns the version of the torch beside this back end."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


def build_tag() -> str:
    """Returns the build tag of a wheel of these sources for the installed torch."""
    major, minor = torch_minor()
    return f"0torch{major}.{minor}.{source_tree.digest(ROOT, PACKAGED)[:8]}"


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds a wheel as scikit-build-core does, for one minor version of torch."""
    tag = {"wheel.build-tag": build_tag()}
    return build.build_wheel(wheel_directory, tag | (config_settings or {}), metadata_directory)


class Requirements:
    """scikit-build-core's plugin for the project's dependencies."""

    _pinned = False

    def build_state(self, state: str) -> None:
        """Called first, with what is built."""
        self._pinned = state == "wheel"

    def dynamic_metadata(
        self, settings: dict[str, Any], project: dict[str, Any]
    ) -> dict[str, list[str]]:
        """Returns the project's dynamic fields."""
        major, minor = torch_minor()
        pinned = f"torch>={major}.{minor},<{major}.{minor + 1}"
        return {"dependencies": [pinned if self._pinned else SUPPORTED, *OTHERS]}
