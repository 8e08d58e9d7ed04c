"""How weights are quantised: the methods. Under `model`, which reads what a checkpoint's config.json says of it."""
