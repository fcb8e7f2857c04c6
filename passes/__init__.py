"""Graph analyses and rewrites; import from compiler leaves, runtime and kernels only."""
