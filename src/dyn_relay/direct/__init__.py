"""An engine's native gRPC service, shown as SGLang's native HTTP API: what speaks HTTP to engines need not change."""
