"""Base against tuned on every test target, with an interval of the change and samples."""
