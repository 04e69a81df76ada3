"""`dyn-sidecar`: stands beside one engine, shows it to proxies, and withdraws it before it ends."""
