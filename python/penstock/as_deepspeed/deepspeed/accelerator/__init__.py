"""The training device, with the names of DeepSpeed's accelerators."""

from .real_accelerator import get_accelerator as get_accelerator
from .real_accelerator import is_current_accelerator_supported as is_current_accelerator_supported
from .real_accelerator import set_accelerator as set_accelerator
