"""Uses of the testkit that stand alone."""
