"""Ways to run the workers. One rank: in the engine's own process."""
