"""Adagrad."""

from .cpu_adagrad import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad
