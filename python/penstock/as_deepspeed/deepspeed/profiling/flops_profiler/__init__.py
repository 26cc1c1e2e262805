"""DeepSpeed's names for counting floating point operations."""

from .profiler import FlopsProfiler as FlopsProfiler
from .profiler import get_model_profile as get_model_profile
