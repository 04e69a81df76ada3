"""gRPC on trio: HTTP/2 by h2, messages by protobuf."""
