"""Tests of the controller against loops, linear programs and arithmetic done by hand."""
