"""Metrics, traces, ledger and reports of a run."""
