"""Copy kernels: one call for all live slots of a layer."""
