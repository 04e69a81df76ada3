"""h2 as it is set up and spoken to here."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings

from dyn_relay.grpc.frames import MAX_FRAME_SIZE

#: The window of a stream, in bytes: what the server may send ahead of whoever takes it. All that a stalled call holds.
#: Who waits for a longer message opens it further, for that message.
STREAM_WINDOW = 16384

#: The window of the connection, in bytes. It bounds no memory (the streams' windows do), only what is on its way.
CONNECTION_WINDOW = 1024 * 1024

#: The largest head or trailers taken, in bytes as HPACK counts them. Larger ones break the connection, so that an error
#: whose text quotes a long request should not be larger.
HEADER_LIST_SIZE = 1024 * 1024


def new_client() -> H2Connection:
    """A client that has said its SETTINGS. h2 knows nothing of GOAWAY here (see `frames`)."""
    made = H2Connection(H2Configuration(client_side=True))
    made.local_settings = Settings(
        client=True,
        initial_values={
            SettingCodes.ENABLE_PUSH: 0,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_SIZE,
            SettingCodes.MAX_HEADER_LIST_SIZE: HEADER_LIST_SIZE,
        },
    )
    made.decoder.max_header_list_size = HEADER_LIST_SIZE
    made.initiate_connection()
    made.increment_flow_control_window(CONNECTION_WINDOW - made.inbound_flow_control_window)
    return made


def goodbye(client: H2Connection, code: int) -> bytes:
    """What h2 has left to say, and a GOAWAY with this error code, unless one is among it."""
    if client.state_machine.state is not ConnectionState.CLOSED:
        client.close_connection(code)
    return client.data_to_send()


def code_name(code: int) -> str:
    """HTTP/2's name of an error code, or its number."""
    try:
        return ErrorCodes(code).name
    except ValueError:
        return f"error {code:#x}"
