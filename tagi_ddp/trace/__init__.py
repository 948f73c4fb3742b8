"""A timeline of what each rank does, for Perfetto, and the step that it makes."""
