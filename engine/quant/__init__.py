"""How weights are quantised: what a checkpoint's config.json says of it, and the methods. Under `model`."""
