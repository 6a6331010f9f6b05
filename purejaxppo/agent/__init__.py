"""The parts of one update: environments, networks, rollout, improvement."""
