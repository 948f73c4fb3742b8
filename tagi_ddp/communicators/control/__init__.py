"""The side channel of small messages that turns a late or lost rank into a typed error."""
