"""torch.compile in DeepSpeed's words."""


def is_compile_supported() -> bool:
    """Returns True: blocks of a model may be compiled before initialize()."""
    return True
