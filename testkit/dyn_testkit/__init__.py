"""Tools to test anything that serves or routes native generation: a deterministic engine, mock workers, faults, laws."""
