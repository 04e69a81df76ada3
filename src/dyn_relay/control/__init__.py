"""The proxy's own endpoints."""
