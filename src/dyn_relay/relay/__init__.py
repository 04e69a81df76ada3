"""The logical request: attempts, failures, budgets, and the bridge for everything else."""
