"""Campaigns against real processes: kill, then check what came back token by token."""
