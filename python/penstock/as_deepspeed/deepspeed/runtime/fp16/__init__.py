"""Loss scales."""
