"""Parts of the GPU check, each a program of its own: `python -m parts.NAME FILE [--rehearse]`."""
