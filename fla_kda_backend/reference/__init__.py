"""References: exact (the rounding order of the kernels) and gold (double precision, token by token)."""
