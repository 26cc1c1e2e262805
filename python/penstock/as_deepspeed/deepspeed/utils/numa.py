"""Reads lists of cores in the form of --bind_core_list."""

from penstock.launch.layout import parse_numbers


def parse_range_list(range_str: str) -> list[int]:
    """Returns the numbers in "0,2-4". Raises ValueError if they are not ascending."""
    return list(parse_numbers(range_str, "[deepspeed::numa]"))
