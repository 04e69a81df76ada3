"""One campaign a file."""
