"""Writers of metrics, which are not built yet."""
