"""Simulated runs of a whole fleet: scenarios, nemeses, seeds, and the smallest plan that still fails."""
