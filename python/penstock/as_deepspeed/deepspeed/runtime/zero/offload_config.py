"""Types of the config's offload sections."""

import enum


class OffloadDeviceEnum(str, enum.Enum):
    """Values of offload_param.device and offload_optimizer.device."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """The state names of engine.offload_states()."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
