"""What git and DVC know of this project, and where it is shared: used by sweep, share and join."""
