"""The engine, pytagi: its loader, and access to the memory of its layers."""
