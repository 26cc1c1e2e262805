"""Optimizers and kernels. All are built in; nothing is compiled at run time."""

from . import adagrad as adagrad
from . import adam as adam
from . import lion as lion
from . import op_builder as op_builder

__compatible_ops__: dict[str, bool] = {
    builder.NAME: builder.COMPATIBLE for builder in op_builder.ALL_OPS.values()
}
