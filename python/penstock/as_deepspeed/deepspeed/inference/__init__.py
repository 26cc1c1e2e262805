"""deepspeed.init_inference() over an engine that only runs forwards."""

from .. import _table

__getattr__ = _table.attributes(__name__)
