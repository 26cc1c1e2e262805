"""Functions that read values from a config dict."""

from typing import Any


def get_scalar_param(param_dict: dict[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param
