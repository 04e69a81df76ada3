"""Another backend, another wire, the same laws.

`worker` and `router` are a backend of fifty lines each: newline-delimited JSON over HTTP. `adopt` is all that it takes
to ask the laws about tokens of it, and `test_toy` asks them.
"""
