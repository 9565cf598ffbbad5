"""Memory settings: what each one does, what it costs, and the choice of a plan for this machine.

Nothing here can change a result: a plan changes how one update is cut, never the update.
"""
