"""Arithmetic of parallelism (`layout`) and communication between ranks (`groups` and its implementations)."""
