"""What keeps a run going when its child dies or runs out of memory."""
