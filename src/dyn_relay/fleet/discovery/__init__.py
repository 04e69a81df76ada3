"""Where workers come from, beside those who add them by hand."""
