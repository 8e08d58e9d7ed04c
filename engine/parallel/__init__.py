"""How a model is spread over ranks: the arithmetic of shares (`layout`), and how ranks talk to each other (`comm`)."""
