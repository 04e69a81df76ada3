"""dyn-relay: a proxy that keeps long LLM rollouts alive when their workers die."""
