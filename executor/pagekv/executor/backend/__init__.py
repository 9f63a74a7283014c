"""The interface of a backend, and what every backend shares."""
