"""Generated messages and stubs of the contract of steps, between manager and executor; the .proto file beside them is
the source.
"""
