"""The processes of one run (`run.launch`): who computes what, and what they tell each other."""
