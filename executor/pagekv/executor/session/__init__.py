"""One manager's attachment: the epoch, its stream of steps, their checks, the worker thread."""
