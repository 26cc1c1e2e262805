"""The `deepspeed` command."""
