"""Native SGLang `/generate`, token mode."""
