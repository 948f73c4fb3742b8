"""The engine, pytagi: loading it anywhere, and reaching the memory of its layers."""
