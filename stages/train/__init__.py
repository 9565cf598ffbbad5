"""The exact update under this machine's plan, exact resume, adapters and their history."""
