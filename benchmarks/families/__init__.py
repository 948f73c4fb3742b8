"""What is measured, a file a family; each has a function `rows`."""
