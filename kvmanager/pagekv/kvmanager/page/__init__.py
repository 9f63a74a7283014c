"""The live page: the blocks of the pool as they change, in a browser. None of it runs while no page is open."""
