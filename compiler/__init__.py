"""The compiler: backend, options, capture, pipeline, report."""
