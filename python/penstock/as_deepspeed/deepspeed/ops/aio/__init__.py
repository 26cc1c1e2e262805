"""Asynchronous file I/O, which is part of the engine's disk tier."""

from ..op_builder import ALL_OPS

AsyncIOBuilder = ALL_OPS["async_io"]
GDSBuilder = ALL_OPS["gds"]
