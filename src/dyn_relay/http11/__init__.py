"""HTTP/1.1 on the `Connection` seam: a strict server, a pooled client, SSE splitting. Knows nothing of engines."""
