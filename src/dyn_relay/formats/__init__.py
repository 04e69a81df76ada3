"""Backends' wire formats as plug-ins: parse, admit, continue, render. Pure code: no I/O, no clock, no randomness."""
