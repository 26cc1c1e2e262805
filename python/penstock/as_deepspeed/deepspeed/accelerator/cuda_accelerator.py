"""DeepSpeed's name for the GPUs of CUDA."""

from .device_accelerator import CUDA_Accelerator as CUDA_Accelerator
