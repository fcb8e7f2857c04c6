"""What can go wrong with the demonstration that the user can put right."""

from __future__ import annotations


class DemoError(Exception):
    """Its text is one line that says what to do; the command prints it and nothing else."""
