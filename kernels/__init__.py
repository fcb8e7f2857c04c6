"""The four ops: contract, reference, and how each target computes them."""
