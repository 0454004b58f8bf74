"""Closed forms and solvers in float64. They judge the layers and therefore import none of them."""
