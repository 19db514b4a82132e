"""The live service around the controller; the numbers 1-5 in the docstrings are the tour."""
