"""The package of deepspeed.checkpointing."""
