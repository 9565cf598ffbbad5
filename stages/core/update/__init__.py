"""The exact update: what trains, how an effective batch is cut, its loss and gradient."""
