"""`serve-llm check`: find out before serving whether one host, or several hosts together, can serve."""
