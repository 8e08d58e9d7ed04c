"""A small model that guesses what the served one says next. Runs in the engine's process, beside the scheduler."""
