"""Which worker gets the next attempt."""
