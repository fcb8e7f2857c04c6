"""torch_cascade: shared-prefix cascade attention for `torch.compile(model, backend="cascade")`."""
