"""One Generate call as the engine sees it: the validated command, the stream of its results."""
