"""Starts the ranks of one host, forwards what they print, and ends all when one fails."""
