"""`python -m dyn_relay`."""

from dyn_relay.cli import main

main(prog_name="dyn-relay")
