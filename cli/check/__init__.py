"""`serve-llm check`: find out in advance whether one host, or several hosts together, can serve."""
