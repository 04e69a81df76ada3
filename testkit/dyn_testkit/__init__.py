"""Tools to test whatever serves or routes native generation: a deterministic engine, mock workers, faults, laws."""
