"""What runs on a host: the agent, its ranks, and what ends them."""
