"""The base class of builders."""

from . import OpBuilder as OpBuilder
