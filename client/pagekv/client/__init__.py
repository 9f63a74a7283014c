"""Client library and command line of PageKV."""
