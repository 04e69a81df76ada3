"""Logs, metrics and the trace file."""
