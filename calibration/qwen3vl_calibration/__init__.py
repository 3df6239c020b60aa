"""Calibration data and quantisation; empty as yet, no command needs it."""
