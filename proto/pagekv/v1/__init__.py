"""Generated messages and stubs of the PageKV contract; the .proto files beside them are the source."""
