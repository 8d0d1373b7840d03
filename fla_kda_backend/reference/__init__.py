"""References in torch: exact.py, the roundings of the 16-token kernels one by one, and gold.py, double precision."""
