"""The live page: the blocks of the pool as they change, in a browser. Nothing in here runs while nobody looks."""
