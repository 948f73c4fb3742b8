"""A timeline of what each rank does, for Perfetto."""
