"""Exact weights: layers that compute a function that is known beforehand."""
