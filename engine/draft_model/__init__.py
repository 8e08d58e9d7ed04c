"""A small model that drafts the served model's next ids. Runs in the engine's process, beside the scheduler."""
