"""Logs and metric exports of other programs, and of our own, read as runs under our metric names."""
