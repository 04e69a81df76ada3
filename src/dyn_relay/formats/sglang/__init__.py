"""SGLang's native HTTP format, as of 0.5.23."""
