"""Families of measurements, one file each; each file has a function `rows`."""
