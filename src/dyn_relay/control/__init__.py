"""The proxy's own endpoints: workers, aborts, health, metrics. Everything else belongs to the relay."""
