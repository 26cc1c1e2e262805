"""Writers of metrics."""
