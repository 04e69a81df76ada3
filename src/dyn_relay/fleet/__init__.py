"""Workers: who they are, how they are, who gets the next attempt."""
