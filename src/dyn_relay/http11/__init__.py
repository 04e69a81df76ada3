"""HTTP/1.1 on the `Connection` seam. Knows nothing of engines."""
