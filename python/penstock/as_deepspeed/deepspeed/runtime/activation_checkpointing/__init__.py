"""deepspeed.checkpointing."""
