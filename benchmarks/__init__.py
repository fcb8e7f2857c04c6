"""Measurements on a GPU: one attention, and whole decoding steps. Not part of the installation."""
