"""A Generate call as the engine sees it: the validated command and the stream of its results."""
