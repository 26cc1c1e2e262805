"""Imported by each Python that a test with a planted bug starts.

Takes away the finder of the editable install, which finds the tree without the bug, and the folder
of the drop-in that was found with it.
"""

import importlib.util
import os
import sys

_others = [one for one in sys.meta_path if not type(one).__module__.startswith("_editable")]
sys.meta_path[:] = _others
_found = importlib.util.find_spec("penstock")
if _found is not None and _found.origin is not None:
    _drop_in = os.path.join(os.path.dirname(_found.origin), "as_deepspeed")
    sys.path[:] = [_drop_in if one.endswith("as_deepspeed") else one for one in sys.path]
